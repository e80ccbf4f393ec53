"""Registry records become publishers."""

from schemas.blocks import Tier
from schemas.registry import EngineRecord, PoolRecord
from services.ingest.registrations import publishers_by_key, publishers_of


def engine(endpoints: dict[Tier, str], dp_rank: int = 0) -> EngineRecord:
    return EngineRecord(instance_id="a", model="m", block_size=4, dp_rank=dp_rank, endpoints=endpoints)


def test_an_engine_without_endpoints_has_no_publisher() -> None:
    assert publishers_of(engine({})) == []


def test_one_socket_per_distinct_url() -> None:
    publishers = publishers_of(engine({Tier.NPU: "tcp://h:1", Tier.CPU: "tcp://h:2", Tier.DISK: "tcp://h:2"}))
    assert [(item.key.endpoint, item.tiers, item.dialect) for item in publishers] == [
        ("tcp://h:1", (Tier.NPU,), "vllm"),
        ("tcp://h:2", (Tier.CPU, Tier.DISK), "pool"),
    ]
    assert [item.primary for item in publishers] == [True, False]


def test_the_socket_of_the_npu_speaks_vllm_whatever_else_comes_there() -> None:
    (publisher,) = publishers_of(engine({Tier.NPU: "tcp://h:1", Tier.CPU: "tcp://h:1"}))
    assert (publisher.dialect, publisher.tiers, publisher.sole) == ("vllm", (Tier.NPU,), True)


def test_a_node_without_an_npu_socket_owns_its_generation() -> None:
    publishers = publishers_of(engine({Tier.CPU: "tcp://h:2", Tier.DISK: "tcp://h:3"}))
    assert [(item.primary, item.sole) for item in publishers] == [(True, False), (False, False)]


def test_dp_06_ranks_and_instances_on_one_host_are_publishers_of_their_own() -> None:
    records = [engine({Tier.NPU: f"tcp://h:{5557 + rank}"}, rank) for rank in range(2)]
    pool = PoolRecord(instance_id="p", model="m", block_size=4, endpoint="tcp://h:9")
    keys = list(publishers_by_key([*records, pool]))
    assert [(key.source, key.instance_id, key.dp_rank) for key in keys] == [
        ("engine", "a", 0),
        ("engine", "a", 1),
        ("pool", "p", 0),
    ]
