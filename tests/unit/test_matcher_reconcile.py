"""Two-phase reconciliation from canonical batch to answered query, in process: every order of events and its outcome.

The first part is the table of orderings that the replaced service documents, the second its unit tests, both with this
project's semantics (docs/compatibility.md).
"""

import itertools
from collections.abc import Sequence

import pytest

from schemas.blocks import Tier, content_hashes, namespace_root, pack_hashes, prefix_keys, token_bytes
from schemas.events import WIRE_VERSION, Cleared, Event, EventBatch, IndexBatch, Location, Removed, Stored, Worker
from schemas.registry import EngineRecord, PoolRecord
from services.matcher.confirmation import finish
from services.matcher.memory_store import MemoryStore
from services.matcher.reconcile import plan
from services.matcher.settings import MatcherSettings
from services.matcher.state import Forget, Message
from services.router.index.plain import PlainIndex
from services.router.index.port import Coverage
from services.router.spaces import Spaces
from services.runtime.registry_store import Registry

MODEL, TENANT, BLOCK = "m", "default", 4
A, B, C = 0xA, 0xB, 0xC
TOKENS = {A: [1, 2, 3, 4], B: [5, 6, 7, 8], C: [9, 10, 11, 12]}
HOST1, HOST2 = "10.0.0.5", "10.0.0.6"


class Cluster:
    """Pure cores of matcher and router; two engines on two hosts and one pool. Time stands still unless moved."""

    def __init__(self, own_tiers: tuple[Tier, ...] = ()) -> None:
        self.store = MemoryStore(MatcherSettings())
        self.spaces = Spaces(PlainIndex)
        self.own_tiers = own_tiers
        self.now = 1_000_000
        self.states: list[str] = []
        self._sequence = itertools.count(1)
        engines = {
            (name, 0): EngineRecord(
                instance_id=name, model=MODEL, block_size=BLOCK, generation=1, backend_ids=(host,), own_tiers=own_tiers
            )
            for name, host in (("one", HOST1), ("two", HOST2))
        }
        pool = PoolRecord(instance_id="pool", model=MODEL, block_size=BLOCK, generation=1, endpoint="tcp://h:1")
        self.spaces.set_registry(Registry(engines, {"pool": pool}))

    async def send(self, source: str, name: str, *events: Event) -> None:
        batch = EventBatch(
            version=WIRE_VERSION,
            source=source,  # type: ignore[arg-type]
            model=MODEL,
            tenant=TENANT,
            instance_id=name,
            dp_rank=0,
            generation=1,
            first_seq=0,
            last_seq=0,
            published_at=0.0,
            received_at=0.0,
            events=list(events),
            own_tiers=self.own_tiers if source == "engine" else (),
            counted=True,
        )
        await self.deliver(batch, next(self._sequence))

    async def deliver(self, batch: EventBatch, sequence: int) -> None:
        for space, steps in plan(batch).items():
            applied = await self.store.apply(space, 1, 1, [Message(sequence, steps.operations())], self.now)
            answer = applied.answers[sequence]
            if answer is None:
                continue
            group, notes = finish(batch, sequence, steps, answer.results)
            self.states += [note.state for note in notes]
            for _ in self.spaces.apply(IndexBatch(WIRE_VERSION, *space, [group])):
                pass
            assert self.spaces.spaces[space].index.audit() == []

    async def npu(self, *names: int, engine: str = "one", parent: int | None = None, lora: str | None = None) -> None:
        await self.send("engine", engine, stored(*names, tier=Tier.NPU, parent=parent, lora=lora))

    async def offload(self, *names: int, engine: str = "one", parent: int | None = None, tokens: bool = True) -> None:
        await self.send("engine", engine, stored(*names, tier=Tier.CPU, parent=parent, tokens=tokens))

    async def engine_removed(self, *names: int, tier: Tier = Tier.CPU, engine: str = "one") -> None:
        await self.send("engine", engine, Removed(tier, pack_hashes(names)))

    async def pool(self, *names: int, host: str = HOST1, tier: Tier = Tier.CPU) -> None:
        for name in names:
            await self.send("pool", "pool", Stored(tier, pack_hashes([name]), backend_id=host))

    async def pool_removed(self, *names: int, host: str = HOST1, tier: Tier = Tier.CPU) -> None:
        for name in names:
            await self.send("pool", "pool", Removed(tier, pack_hashes([name]), backend_id=host))

    async def pool_cleared(self, host: str = HOST1, tiers: tuple[Tier, ...] = (Tier.CPU, Tier.DISK)) -> None:
        await self.send("pool", "pool", Cleared(tiers, backend_id=host))

    async def pending(self) -> int:
        return await self.store.pending((MODEL, TENANT))

    async def expire(self) -> int:
        return len(await self.store.expire((MODEL, TENANT), 1, self.now, 1000))

    def query(self, *names: int, engine: str = "one", lora: str | None = None) -> Coverage:
        space = self.spaces.find(MODEL, TENANT)
        assert space is not None
        tokens = [token for name in names or (A, B, C) for token in TOKENS[name]]
        keys = prefix_keys(content_hashes(token_bytes(tokens), BLOCK), namespace_root(lora))
        answers = space.index.match(keys.tobytes(), space.candidates, space.pool_holders)
        return dict(zip([record.instance_id for record in space.engines], answers, strict=True))[engine]


def stored(*names: int, tier: Tier, parent: int | None = None, lora: str | None = None, tokens: bool = True) -> Stored:
    contents = content_hashes(token_bytes([token for name in names for token in TOKENS[name]]), BLOCK).tobytes()
    return Stored(
        tier=tier,
        engine_hashes=pack_hashes(names),
        parent=parent,
        content_hashes=contents if tokens else b"",
        root=namespace_root(lora),
        block_size=BLOCK if tokens else 0,
    )


def coverage(npu: int = 0, local: int = 0, remote: int = 0, disk_local: int = 0, disk_remote: int = 0) -> Coverage:
    return Coverage(npu, local, remote, disk_local, disk_remote)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_offload_then_pool_is_confirmed_at_pool_time(cluster: Cluster) -> None:
    await cluster.offload(A)
    assert cluster.query() == coverage()
    await cluster.pool(A)
    assert cluster.query() == coverage(local=1)
    assert cluster.query(engine="two") == coverage(remote=1)
    assert cluster.states == ["offload_cached", "confirmed"]


async def test_pool_then_offload_in_time_is_matched_at_offload_time(cluster: Cluster) -> None:
    await cluster.pool(A)
    cluster.now += 59_999
    await cluster.offload(A)
    assert cluster.query() == coverage(local=1)
    assert cluster.states == ["queued", "matched"]
    assert await cluster.pending() == 0


async def test_pool_then_offload_too_late_is_not_matched_and_the_expiry_is_noticed(cluster: Cluster) -> None:
    await cluster.pool(A)
    cluster.now += 60_001
    assert await cluster.expire() == 1
    await cluster.offload(A)
    assert cluster.query() == coverage()


async def test_offload_twice_refreshes(cluster: Cluster) -> None:
    await cluster.offload(A)
    cluster.now += 500_000
    await cluster.offload(A)
    cluster.now += 500_000
    await cluster.pool(A)
    assert cluster.query() == coverage(local=1)


async def test_pool_twice_from_one_location_is_idempotent(cluster: Cluster) -> None:
    await cluster.pool(A)
    await cluster.pool(A)
    assert await cluster.pending() == 1
    await cluster.offload(A)
    await cluster.pool_removed(A)
    assert cluster.query() == coverage()


async def test_two_locations_then_offload_inserts_both(cluster: Cluster) -> None:
    await cluster.pool(A, host=HOST1)
    await cluster.pool(A, host=HOST2)
    await cluster.offload(A)
    assert cluster.query() == coverage(local=1)
    assert cluster.query(engine="two") == coverage(local=1)


async def test_offload_then_two_locations_inserts_both(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A, host=HOST1)
    cluster.now += 299_000
    await cluster.pool(A, host=HOST2)
    assert cluster.query(engine="two") == coverage(local=1)


async def test_offload_then_engine_removed_then_pool_waits_and_expires(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.engine_removed(A)
    await cluster.pool(A)
    assert cluster.query() == coverage()
    cluster.now += 61_000
    assert await cluster.expire() == 1


async def test_pool_then_pool_removed_then_offload_leaves_only_content(cluster: Cluster) -> None:
    await cluster.pool(A)
    await cluster.pool_removed(A)
    await cluster.offload(A)
    assert cluster.query() == coverage()
    assert cluster.states[-1] == "offload_cached"


async def test_offload_pool_pool_removed_takes_the_block_out(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A)
    await cluster.pool_removed(A)
    assert cluster.query() == coverage()


async def test_a_block_stored_again_soon_is_inserted_from_remembered_content(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A)
    await cluster.pool_removed(A)
    cluster.now += 299_000
    await cluster.pool(A)
    assert cluster.query() == coverage(local=1)


async def test_removal_by_another_location_leaves_content_for_the_first(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool_removed(A, host=HOST2)
    await cluster.pool(A, host=HOST1)
    assert cluster.query() == coverage(local=1)


async def test_a_child_confirmed_before_its_parent_counts_once_the_parent_is_there(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.offload(B, parent=A)
    await cluster.pool(B)
    assert cluster.query() == coverage()
    await cluster.pool(A)
    assert cluster.query() == coverage(local=2)


async def test_content_learnt_from_an_npu_event_matches_though_no_offload_event_ever_came(cluster: Cluster) -> None:
    await cluster.npu(A, B)
    await cluster.engine_removed(A, B, tier=Tier.NPU)
    assert cluster.query() == coverage()
    await cluster.pool(A, B)
    assert cluster.query() == coverage(local=2)


async def test_an_npu_event_completes_a_waiting_pool_event(cluster: Cluster) -> None:
    await cluster.pool(A)
    await cluster.npu(A)
    assert cluster.query() == coverage(npu=1)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage(local=1)
    assert cluster.states == ["queued", "applied", "matched", "applied"]


async def test_npu_removals_never_touch_offload_content_or_pool_blocks(cluster: Cluster) -> None:
    await cluster.npu(A, B)
    await cluster.offload(A)
    await cluster.offload(B, parent=A)
    await cluster.engine_removed(A, B, tier=Tier.NPU)
    await cluster.pool(A, B)
    assert cluster.query() == coverage(local=2)


async def test_ha_07_pool_content_of_an_unknown_adapter_is_not_offered_to_an_adapter(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A)
    assert cluster.query(lora="b") == coverage()


async def test_npu_content_knows_the_adapter_where_the_offload_event_does_not(cluster: Cluster) -> None:
    await cluster.npu(A, B, lora="ad")
    await cluster.offload(A)
    await cluster.offload(B, parent=A)
    await cluster.engine_removed(A, B, tier=Tier.NPU)
    await cluster.pool(A, B)
    assert cluster.query(lora="ad") == coverage(local=2)
    assert cluster.query() == coverage()


async def test_an_adapter_learnt_late_takes_back_what_was_confirmed_without_it(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.offload(B, parent=A)
    await cluster.pool(A, B)
    assert cluster.query() == coverage(local=2)
    await cluster.npu(A, B, lora="ad")
    assert cluster.query() == coverage()
    assert cluster.query(lora="ad") == coverage(npu=2)
    await cluster.engine_removed(A, B, tier=Tier.NPU)
    assert cluster.query(lora="ad") == coverage(local=2)


async def test_clear_of_a_location_clears_its_pool_tiers_and_nothing_else(cluster: Cluster) -> None:
    await cluster.npu(A)
    await cluster.offload(A)
    await cluster.pool(A, host=HOST1)
    await cluster.pool(A, host=HOST2)
    await cluster.pool(A, host=HOST1, tier=Tier.DISK)
    await cluster.pool_cleared(HOST1)
    assert cluster.query() == coverage(npu=1)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage(remote=1)


async def test_a_clear_that_names_a_medium_clears_just_that_one(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A)
    await cluster.pool(A, tier=Tier.DISK)
    await cluster.pool_cleared(HOST1, (Tier.CPU,))
    assert cluster.query() == coverage(disk_local=1)


async def test_a_clear_without_a_location_clears_nothing_and_is_counted(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A)
    await cluster.pool_cleared("")
    assert cluster.query() == coverage(local=1)
    assert cluster.states[-1] == "dropped"


async def test_clear_empties_the_waiting_entries_of_its_location(cluster: Cluster) -> None:
    await cluster.pool(A, B)
    await cluster.pool_cleared(HOST1)
    assert await cluster.pending() == 0
    await cluster.offload(A)
    assert cluster.query() == coverage()


async def test_all_blocks_cleared_of_an_engine_means_its_npu_alone() -> None:
    cluster = Cluster(own_tiers=(Tier.CPU,))
    await cluster.npu(A, B)
    await cluster.offload(A, B, tokens=False)
    await cluster.send("engine", "one", Cleared((Tier.NPU,)))
    assert cluster.query() == coverage(local=2)


async def test_po_01_offload_events_without_tokens_are_tier_changes_of_known_blocks() -> None:
    cluster = Cluster(own_tiers=(Tier.CPU,))
    await cluster.npu(A, B)
    await cluster.offload(B, A, tokens=False)
    await cluster.engine_removed(A, B, tier=Tier.NPU)
    assert cluster.query() == coverage(local=2)
    assert cluster.query(engine="two") == coverage()


async def test_an_own_tier_event_that_precedes_its_content_waits_for_it() -> None:
    cluster = Cluster(own_tiers=(Tier.CPU,))
    await cluster.offload(A, tokens=False)
    assert cluster.states == ["queued"]
    await cluster.npu(A)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage(local=1)


async def test_own_tier_events_with_tokens_are_proof_by_themselves() -> None:
    cluster = Cluster(own_tiers=(Tier.CPU,))
    await cluster.offload(A)
    await cluster.offload(B, parent=A)
    assert cluster.query() == coverage(local=2)
    await cluster.engine_removed(A)
    assert cluster.query() == coverage()
    await cluster.offload(A)
    assert cluster.query() == coverage(local=2)


async def test_with_a_pool_behind_the_engine_offload_events_prove_nothing(cluster: Cluster) -> None:
    await cluster.npu(A)
    await cluster.offload(A)
    await cluster.offload(A, tokens=False)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage()


async def test_a_block_the_router_still_knows_by_name_needs_no_content(cluster: Cluster) -> None:
    await cluster.offload(A)
    await cluster.pool(A, host=HOST1)
    cluster.now += 700_000
    await cluster.pool(A, host=HOST2)
    assert cluster.states[-1] == "queued"
    assert cluster.query(engine="two") == coverage(local=1)


async def test_a_hole_hides_what_follows_and_forgets_nothing(cluster: Cluster) -> None:
    await cluster.npu(A, B, C)
    await cluster.engine_removed(A, B, C, tier=Tier.NPU)
    await cluster.pool(A, B, C)
    await cluster.pool_removed(B)
    assert cluster.query() == coverage(local=1)
    await cluster.pool(B, host=HOST2)
    assert cluster.query() == coverage(local=2, remote=1)


async def test_blocks_on_an_unregistered_node_extend_the_prefix_as_remote_blocks(cluster: Cluster) -> None:
    await cluster.npu(A, B, C)
    await cluster.engine_removed(B, C, tier=Tier.NPU)
    await cluster.pool(B, C, host="10.9.9.9")
    assert cluster.query() == coverage(npu=1, remote=2)
    space = cluster.spaces.find(MODEL, TENANT)
    assert space is not None
    assert [engine.instance_id for engine in space.engines] == ["one", "two"]


async def test_cpu_goes_before_disk_and_local_before_remote(cluster: Cluster) -> None:
    await cluster.npu(A, B)
    await cluster.engine_removed(A, B, tier=Tier.NPU)
    await cluster.pool(A, tier=Tier.DISK)
    await cluster.pool(A, host=HOST2)
    await cluster.pool(B, tier=Tier.DISK, host=HOST2)
    assert cluster.query(A, B) == coverage(remote=1, disk_remote=1)


async def test_forgetting_a_worker_leaves_the_other_workers_waiting_entries() -> None:
    cluster = Cluster(own_tiers=(Tier.CPU,))
    await cluster.offload(A, tokens=False, engine="one")
    await cluster.offload(A, tokens=False, engine="two")
    forget = Message(-1, (Forget(Worker("one", 0), (Tier.CPU,)),))
    await cluster.store.apply((MODEL, TENANT), 1, 1, [forget], cluster.now)
    await cluster.npu(A, engine="two")
    await cluster.engine_removed(A, tier=Tier.NPU, engine="two")
    assert cluster.query(engine="one") == coverage()
    assert cluster.query(engine="two") == coverage(local=1)


async def test_ex_01_a_hash_stored_twice_needs_two_removals_and_a_clear_resets_the_count(cluster: Cluster) -> None:
    await cluster.npu(A)
    await cluster.npu(A)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage(npu=1)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage()
    await cluster.npu(A)
    await cluster.npu(A)
    await cluster.send("engine", "one", Cleared((Tier.NPU,)))
    await cluster.npu(A)
    await cluster.engine_removed(A, tier=Tier.NPU)
    assert cluster.query() == coverage()


@pytest.mark.parametrize("seed", range(30))
async def test_na_07_redelivery_of_any_message_changes_nothing(seed: int) -> None:
    import random

    chance = random.Random(seed)
    history = [_random_batch(chance) for _ in range(40)]
    once, repeated = Cluster(), Cluster()
    for sequence, batch in enumerate(history, start=1):
        await once.deliver(batch, sequence)
        await repeated.deliver(batch, sequence)
        for _ in range(chance.choice([0, 0, 1, 3])):
            earlier = chance.randint(max(1, sequence - 5), sequence)
            await repeated.deliver(history[earlier - 1], earlier)
    assert _answers(once) == _answers(repeated)
    assert await once.pending() == await repeated.pending()


def _answers(cluster: Cluster) -> list[Coverage]:
    queries: Sequence[tuple[int, ...]] = [(A,), (A, B), (A, B, C), (B,), (C,)]
    return [cluster.query(*names, engine=engine) for names in queries for engine in ("one", "two")]


def _random_batch(chance: object) -> EventBatch:
    import random

    assert isinstance(chance, random.Random)
    names = chance.choice([(A,), (A, B), (A, B, C)])
    if chance.random() < 0.5:
        source, name = "engine", chance.choice(["one", "two"])
        event: Event = chance.choice(
            [
                stored(*names, tier=chance.choice([Tier.NPU, Tier.CPU])),
                Removed(chance.choice([Tier.NPU, Tier.CPU]), pack_hashes(names)),
                Cleared((Tier.NPU,)),
            ]
        )
    else:
        source, name = "pool", "pool"
        host, tier = chance.choice([HOST1, HOST2]), chance.choice([Tier.CPU, Tier.DISK])
        event = chance.choice(
            [
                Stored(tier, pack_hashes(names), backend_id=host),
                Removed(tier, pack_hashes(names), backend_id=host),
                Cleared((tier,), backend_id=host),
            ]
        )
    return EventBatch(
        WIRE_VERSION,
        source,
        MODEL,
        TENANT,
        name,
        0,
        1,
        0,
        0,
        0.0,
        0.0,
        [event],
        (),
        source == "engine",  # type: ignore[arg-type]
    )


def test_locations_and_workers_are_different_holders() -> None:
    assert Location("pool", HOST1) != Worker("pool", 0)
