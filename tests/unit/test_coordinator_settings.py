"""The coordinator's section of the configuration: defaults, the known spellings, refusals that name the key."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.registry import EngineRecord
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.static_registrations import pool_model
from services.runtime.config import ConfigError, load_config
from services.runtime.registry_store import Registry


def engine(instance_id: str, model: str = "m", store_backend: str = "Memcache") -> EngineRecord:
    return EngineRecord(instance_id=instance_id, model=model, block_size=16, store_backend=store_backend)


def settings(**values: Any) -> CoordinatorSettings:
    return CoordinatorSettings.model_validate(values)


def problems(**values: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        settings(**values)
    return str(refused.value)


def test_the_ports_and_defaults_are_those_of_existing_deployments() -> None:
    found = settings()
    assert (found.inference_port, found.management_port, found.metrics_port) == (1025, 1026, 1027)
    assert (found.block_size, found.engine_type, found.store_backend) == (128, "vLLM", "Mooncake")


def test_names_are_case_insensitive_and_the_older_key_names_are_understood() -> None:
    found = settings(store_backend="MEMCACHE", engine_type="VLLM", model_path="/m/qwen", xpu_endpoint="tcp://*:6000")
    assert (found.store_backend, found.engine_type, found.model) == ("Memcache", "vLLM", "/m/qwen")
    assert found.npu_endpoint == "tcp://*:6000"


def test_a_static_engine_takes_the_sections_defaults() -> None:
    found = settings(model="qwen", block_size=16, engines=[{"instance_id": "e", "host": "10.0.0.5", "port": 5557}])
    assert found.static_bodies("engines") == [
        {
            "type": "vLLM",
            "block_size": 16,
            "dp_rank": 0,
            "store_backend": "Mooncake",
            "kind": "engine",
            "modelname": "qwen",
            "instance_id": "e",
            "host": "10.0.0.5",
            "port": 5557,
        }
    ]


def test_bs_06_a_misspelt_key_in_a_static_registration_fails_at_start_and_is_named() -> None:
    text = problems(model="m", engines=[{"instance_id": "e", "host": "h", "port": 1, "blockSize": 64}])
    assert "engines.0: unknown key blockSize" in text


def test_bs_06_a_misspelt_key_of_the_section_fails_at_start_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "kvroute.yaml"
    path.write_text("coordinator:\n  blockSize: 64\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown key coordinator\.blockSize, did you mean block_size"):
        load_config(str(path), {})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engines": [{"instance_id": "e", "host": "h", "port": 1}]}, "engines.0.modelname"),
        ({"model": "m", "engines": [{"instance_id": "e", "endpoint": "tcp://0.0.0.0:1"}]}, "engines.0.endpoint"),
        (
            {"model": "m", "engines": [{"instance_id": "e"}, {"instance_id": "e"}]},
            "engines.1: e rank 0 is listed twice",
        ),
        ({"model": "m", "pools": [{"instance_id": "p"}]}, "pools.0.endpoint"),
        ({"npu_endpoint": "tcp://10.0.0.5:5557"}, "stands for every engine"),
        ({"replay_endpoint": "http://x"}, "tcp://host:port"),
        ({"pool_endpoint": "tcp://*"}, "tcp://host:port"),
        ({"pool_endpoint": "tcp://*:5557", "store_backend": "none"}, "has no pool publisher"),
        ({"store_backend": "redis"}, "store_backend"),
        ({"block_size": 0}, "block_size"),
        ({"front_door": {"router_url": "router:13333"}}, "router_url"),
    ],
)
def test_a_wrong_value_fails_at_start_and_is_named(values: dict[str, Any], named: str) -> None:
    assert named in problems(**values)


def test_the_pools_model_is_the_configured_one_else_the_one_that_all_engines_serve() -> None:
    one = Registry({("a", 0): engine("a")})
    two = Registry({("a", 0): engine("a"), ("b", 0): engine("b", "n")})
    memcache = settings(store_backend="memcache")
    assert pool_model(settings(model="x"), two) == ("x", "")
    assert pool_model(memcache, one) == ("m", "")
    assert pool_model(memcache, Registry())[0] is None
    assert "coordinator.model" in pool_model(memcache, two)[1]
    assert pool_model(settings(store_backend="mooncake"), one)[0] is None
