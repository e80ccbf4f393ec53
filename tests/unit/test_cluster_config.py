"""`kvroute config` prints lines that work, or says which option to change."""

import json
import re

import pytest
from typer.testing import CliRunner

from kvroute.cluster_config.engine import EngineSetup, SetupError, check_engine, engine_lines, registrations
from kvroute.cluster_config.pool import PoolSetup, pool_lines, registration
from kvroute.commands.config import app

ROUTER = "http://router:13333"


def engine(**changes: object) -> EngineSetup:
    values: dict[str, object] = {"model": "Qwen3", "instance_id": "prefill-1", "host": "10.0.0.5", "dp_size": 4}
    return EngineSetup(**(values | changes))  # type: ignore[arg-type]


def test_every_rank_gets_its_own_event_and_replay_port() -> None:
    bodies = registrations(engine())
    assert [body["medium_endpoints"] for body in bodies] == [{"npu": f"tcp://10.0.0.5:{5557 + r}"} for r in range(4)]
    assert [body["replay_endpoint"] for body in bodies] == [f"tcp://10.0.0.5:{6667 + r}" for r in range(4)]
    assert [body["dp_rank"] for body in bodies] == [0, 1, 2, 3]


def test_replay_ports_that_would_overlap_event_ports_of_other_ranks_are_refused() -> None:
    with pytest.raises(SetupError, match=r"replay_port: .*more than 3 apart") as caught:
        check_engine(engine(replay_port=5558))
    assert caught.value.field == "replay_port"
    check_engine(engine(replay_port=5561))
    check_engine(engine(dp_size=1, replay_port=5558))


def test_a_later_hosts_ranks_count_from_rank_zero_ports() -> None:
    with pytest.raises(SetupError, match="replay_port"):
        check_engine(engine(first_rank=4, dp_size=4, replay_port=5564))
    assert registrations(engine(first_rank=4, dp_size=1))[0]["medium_endpoints"] == {"npu": "tcp://10.0.0.5:5561"}


def test_engine_lines_carry_seed_topic_and_a_parsable_events_config() -> None:
    text = engine_lines(engine(topic="events", hash_seed="7"), ROUTER)
    assert "export PYTHONHASHSEED=7" in text
    config = json.loads(re.search(r"--kv-events-config '(.*)'", text)[1])  # type: ignore[index]
    assert config["topic"] == "events"
    assert config["endpoint"] == "tcp://*:5557"
    assert config["replay_endpoint"] == "tcp://*:6667"
    assert config["enable_kv_cache_events"] is True
    assert text.count("/register") == 4


def test_ipv6_hosts_are_bracketed_in_urls() -> None:
    assert registrations(engine(host="fd00::5"))[0]["medium_endpoints"] == {"npu": "tcp://[fd00::5]:5557"}
    assert registration(PoolSetup("memcache", "m", "fd00::9"))["endpoint"] == "tcp://[fd00::9]:5557"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": " "}, "model"),
        ({"host": "*"}, "host"),
        ({"host": "[::]"}, "host"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 5000}, "block_size"),
        ({"dp_size": 0}, "dp_size"),
        ({"event_port": 0}, "event_port"),
        ({"event_port": 65_535}, "event_port"),
        ({"hash_seed": "random"}, "hash_seed"),
    ],
)
def test_an_engine_setup_that_cannot_work_names_the_option(changes: dict[str, object], field: str) -> None:
    with pytest.raises(SetupError) as caught:
        engine_lines(engine(**changes), ROUTER)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"backend": "redis"}, "backend"),
        ({"model": ""}, "model"),
        ({"host": "0.0.0.0"}, "host"),
        ({"block_size": -1}, "block_size"),
        ({"event_port": 70_000}, "event_port"),
        ({"event_port": 50_090}, "event_port"),
    ],
)
def test_a_pool_setup_that_cannot_work_names_the_option(changes: dict[str, object], field: str) -> None:
    values: dict[str, object] = {"backend": "memcache", "model": "m", "host": "kvs-master"}
    with pytest.raises(SetupError) as caught:
        pool_lines(PoolSetup(**(values | changes)), ROUTER)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_memcache_lines_switch_events_on_and_mooncake_lines_move_the_metrics_port() -> None:
    memcache = pool_lines(PoolSetup("MemCache", "Qwen3", "kvs-master"), ROUTER)
    assert "ock.mmc.kv_events.enable = true" in memcache
    assert "ock.mmc.kv_events.model_name = Qwen3" in memcache
    assert '"store_backend": "Memcache"' in memcache
    mooncake = pool_lines(PoolSetup("MOONCAKE", "Qwen3", "kvs-master"), ROUTER)
    assert "--metrics_port 50090" in mooncake
    assert '"instance_id": "mooncake-pool"' in mooncake


def test_the_command_exits_2_and_names_the_option_on_the_command_line() -> None:
    arguments = [
        "engine",
        "--model",
        "m",
        "--instance-id",
        "i",
        "--host",
        "h",
        "--dp-size",
        "2",
        "--replay-port",
        "5558",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--replay-port rank r listens on" in result.output
    good = CliRunner().invoke(app, ["pool", "--backend", "memcache", "--model", "m", "--host", "kvs-master"])
    assert good.exit_code == 0, good.output
