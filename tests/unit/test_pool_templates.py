"""The pool templates in deploy/: events off by default, right ports, errors that name the variable."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


def load_meta_service() -> Any:
    spec = importlib.util.spec_from_file_location("meta_service", DEPLOY / "memcache" / "meta_service.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def active_lines(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}


def test_memcache_events_are_off_by_default_in_both_forms() -> None:
    assert not [key for key in active_lines(DEPLOY / "memcache" / "mmc-meta.conf") if "kv_events" in key]
    assert not [key for key in load_meta_service().settings({"POD_IP": "10.0.0.1"}) if "kv_events" in key]


def test_the_commented_block_has_every_setting_that_events_need() -> None:
    text = (DEPLOY / "memcache" / "mmc-meta.conf").read_text()
    keys = re.findall(r"^# ock\.mmc\.kv_events\.(\w+) = ", text, re.MULTILINE)
    assert keys == ["enable", "endpoint", "model_name", "block_size", "hash_as_int"]


def test_the_local_service_owns_its_blocks_under_its_pod_ip() -> None:
    conf = active_lines(DEPLOY / "memcache" / "mmc-local.conf")
    assert conf["ock.mmc.local_service.backend_id"] == "@POD_IP@"


def test_the_launcher_serves_metrics_on_50090_and_events_when_asked() -> None:
    environment = {
        "POD_IP": "fd00::1",
        "KV_EVENTS_ENABLE": "True",
        "KV_EVENTS_MODEL_NAME": "Qwen3",
        "KV_EVENTS_BLOCK_SIZE": "128",
    }
    values = load_meta_service().settings(environment)
    assert values["metrics_url"] == "http://[fd00::1]:50090"
    assert values["meta_service_url"] == "tcp://[fd00::1]:50088"
    assert values["kv_events_enable"] is True
    assert values["kv_events_endpoint"] == "tcp://0.0.0.0:5557"
    assert (values["kv_events_model_name"], values["kv_events_block_size"]) == ("Qwen3", 128)
    assert values["kv_events_hash_as_int"] is True


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({}, "POD_IP"),
        ({"POD_IP": "h", "KV_STORE_METRICS_PORT": "0"}, "KV_STORE_METRICS_PORT"),
        ({"POD_IP": "h", "KV_EVENTS_ENABLE": "true"}, "KV_EVENTS_MODEL_NAME"),
        ({"POD_IP": "h", "KV_EVENTS_ENABLE": "1", "KV_EVENTS_MODEL_NAME": "m"}, "KV_EVENTS_BLOCK_SIZE"),
    ],
)
def test_the_launcher_names_the_variable_that_is_missing_or_wrong(environment: dict[str, str], variable: str) -> None:
    with pytest.raises(ValueError, match=variable):
        load_meta_service().settings(environment)


def run_master(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(DEPLOY / "mooncake" / "master.sh"), *arguments],
        env={"PATH": os.environ["PATH"], "MOONCAKE_MASTER": "echo"} | environment,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )


def test_mooncake_master_starts_with_its_metrics_port_on_50090_and_no_events() -> None:
    words = run_master({}, "--v=1").stdout.split()
    assert words[words.index("--metrics_port") + 1] == "50090"
    assert words[-1] == "--v=1"
    assert not [word for word in words if "kv_events" in word]


def test_mooncake_master_publishes_events_under_the_pods_address_when_asked() -> None:
    words = run_master(
        {"KV_EVENTS_ENABLE": "true", "POD_IP": "10.0.0.7", "MOONCAKE_METRICS_PORT": "1234"}
    ).stdout.split()
    assert "--enable_kv_events=true" in words
    assert words[words.index("--kv_events_backend_id") + 1] == "10.0.0.7"
    assert words[words.index("--metrics_port") + 1] == "1234"
    failed = run_master({"KV_EVENTS_ENABLE": "true"})
    assert failed.returncode != 0
    assert "POD_IP" in failed.stderr
