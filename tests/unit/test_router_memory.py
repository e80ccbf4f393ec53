"""Nothing in the router grows with the number of pods that ever lived (T38)."""

import time

from schemas.blocks import Tier, pack_hashes
from schemas.events import WIRE_VERSION, IndexBatch, IndexEvent, IndexGroup, IndexStored, Location, Worker
from schemas.liveness import Liveness
from schemas.registry import EngineRecord, PoolRecord
from services.router.feedback import Feedback, Response
from services.router.index import create_index
from services.router.publishers import PublisherKey
from services.router.spaces import Spaces
from services.router.standing import Following, Heard
from services.runtime.registry_store import Registry

MODEL, BLOCK = "m", 4
POOL = PoolRecord(instance_id="pool", model=MODEL, block_size=BLOCK, generation=1, endpoint="tcp://p:1")


def apply(spaces: Spaces, sequence: int, source: str, name: str, generation: int, *events: IndexEvent) -> None:
    group = IndexGroup(sequence, source, name, 0, generation, 1, 1, 1.0, list(events))  # type: ignore[arg-type]
    for _ in spaces.apply(IndexBatch(WIRE_VERSION, MODEL, "default", [group], 1)):
        pass


def silence(key: PublisherKey) -> Heard:
    return Heard(None, 0.0)


def unchecked(instance_id: str, rank: int) -> Liveness | None:
    return None


def sizes(spaces: Spaces, feedback: Feedback) -> dict[str, int]:
    """Entries of every map that publishers, holders or reports can fill."""
    spaces.accounts.check()
    (space,) = spaces.spaces.values()
    stats = space.index.stats()
    return {
        "publishers": len(spaces.publishers.states()),
        "holders": len(space._holders),
        "domains": len(space._domains),
        "leaving": len(space._leaving),
        "standings": len(spaces.standings.all()),
        "answers": len(spaces.standings._answers),
        "accounts": len(spaces.accounts._accounts),
        "drift": len(list(next(iter(feedback.collect())).samples)),
        "blocks": stats.blocks,
        "names": stats.names,
        "waiting": stats.waiting,
    }


def test_t38_hundreds_of_pods_that_came_and_went_leave_nothing_behind() -> None:
    spaces = Spaces(lambda: create_index("auto", 100_000, 1_000))
    feedback = Feedback(lambda: spaces.registry.engines)
    measured = []
    sequence = 0
    for life in range(600):
        name = f"pod-{life}"
        record = EngineRecord(instance_id=name, model=MODEL, block_size=BLOCK, generation=10 + life)
        spaces.set_registry(Registry({(name, 0): record}, {"pool": POOL}))
        names = pack_hashes(range(life * 8 + 1, life * 8 + 5))
        waits = pack_hashes([life * 8 + 7])
        host = Location("pool", f"10.0.{life // 250}.{life % 250}")
        events: list[IndexEvent] = [
            IndexStored(Worker(name, 0), Tier.NPU, names, None, names, 0, BLOCK),
            IndexStored(Worker(name, 0), Tier.NPU, waits, 999_999_999 + life, waits, 0, BLOCK),
        ]
        sequence += 1
        apply(spaces, sequence, "engine", name, 10 + life, *events)
        sequence += 1
        stored = IndexStored(host, Tier.CPU, names, None, names, 0, BLOCK, False, Worker(name, 0))
        apply(spaces, sequence, "pool", "pool", 1, stored)
        feedback.take([Response((name, 0), 4, 4)])
        spaces.standings.update(
            spaces.registry, spaces.publishers, silence, unchecked, Following.CURRENT, 0, time.time()
        )
        spaces.set_registry(Registry({}, {}))
        while spaces.sweep():
            pass
        spaces.set_registry(Registry({(name, 0): record}, {"pool": POOL}))
        spaces.tidy()
        spaces.standings.update(
            spaces.registry, spaces.publishers, silence, unchecked, Following.CURRENT, 0, time.time()
        )
        measured.append(sizes(spaces, feedback))
    assert measured[-1] == measured[50], "as many entries after 600 pods as after 50"
    assert max(measured[-1].values()) <= 4
