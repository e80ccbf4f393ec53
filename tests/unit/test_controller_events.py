"""Controller messages: nothing that arrives does more than be refused."""

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.registration import RegistrationError
from services.coordinator.controller_events import EventKind, parse_controller_event
from services.coordinator.settings import CoordinatorSettings

SETTINGS = CoordinatorSettings()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
INSTANCE = st.fixed_dictionaries(
    {"id": JSON, "role": st.sampled_from(["prefill", "union", "decode", "x", None])},
    optional={
        "model_name": JSON,
        "engine_type": JSON,
        "node_managers": JSON,
        "endpoints": JSON | st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=2), JSON)),
    },
)


@given(
    st.sampled_from([*map(str, EventKind), "SET", "x", None, 5]),
    st.lists(INSTANCE, max_size=3) | JSON,
    st.dictionaries(st.sampled_from(["model_name", "engine_type"]), JSON),
)
def test_any_message_is_read_or_refused(event: Any, instances: Any, more: dict[str, Any]) -> None:
    with contextlib.suppress(RegistrationError):
        found = parse_controller_event({"event": event, "instances": instances, **more}, SETTINGS)
        assert set(found.engines) <= set(found.named)
        assert all(problems for problems in found.refused.values())


def test_every_record_of_a_message_belongs_to_the_controller_and_names_its_rank() -> None:
    instance = {"id": "7", "role": "P", "endpoints": {"10.0.0.1": {"3": {"id": 3, "ip": "10.0.0.1", "headless": True}}}}
    found = parse_controller_event({"event": "ADD", "instances": [instance], "model_name": "qwen"}, SETTINGS)
    (record,) = found.engines["vllm-prefill-7"]
    assert (record.dp_rank, record.origin, record.model, record.url) == (3, "controller", "qwen", None)
    assert record.endpoints == {"npu": "tcp://10.0.0.1:5560"}
