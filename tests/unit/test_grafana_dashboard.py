"""The dashboard asks for metrics that the services have."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_metric_of_the_dashboard_is_defined_by_a_service() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "kvroute.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"\b(?:kvroute|kv_store)_[a-z_]+", " ".join(expressions)))
    source = "\n".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    defined = set(re.findall(r'"((?:kvroute|kv_store)_[a-z_]+)"', source))
    missing = {name for name in asked if name not in defined and name.removesuffix("_bucket") not in defined}
    assert len(asked) >= 12
    assert missing == set()
