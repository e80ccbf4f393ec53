"""Applying index batches: fences by generation, repeats, registry changes, locations."""

from schemas.blocks import Tier, content_hashes, pack_hashes, prefix_keys, token_bytes
from schemas.events import (
    WIRE_VERSION,
    Holder,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexRemoved,
    IndexStored,
    Location,
    Worker,
)
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from services.router.index.plain import PlainIndex
from services.router.spaces import Spaces
from services.runtime.registry_store import Registry

MODEL, TENANT, BLOCK = "m", "t", 4
TOKENS = list(range(1, 9))
ONE, TWO = Worker("one", 0), Worker("two", 0)


def engine(name: str, generation: int = 10, model: str = MODEL, backend_ids: tuple[str, ...] = ()) -> EngineRecord:
    return EngineRecord(
        instance_id=name, model=model, tenant=TENANT, block_size=BLOCK, generation=generation, backend_ids=backend_ids
    )


def pool(generation: int = 10) -> PoolRecord:
    return PoolRecord(
        instance_id="pool", model=MODEL, tenant=TENANT, block_size=BLOCK, generation=generation, endpoint="tcp://h:1"
    )


def registry(*records: EngineRecord | PoolRecord | RetiredRecord) -> Registry:
    return Registry(
        {(r.instance_id, r.dp_rank): r for r in records if isinstance(r, EngineRecord)},
        {r.instance_id: r for r in records if isinstance(r, PoolRecord)},
        tuple(r for r in records if isinstance(r, RetiredRecord)),
    )


def stored(holder: Holder = ONE, tier: Tier = Tier.NPU) -> IndexStored:
    return IndexStored(
        holder, tier, pack_hashes([1, 2]), None, content_hashes(token_bytes(TOKENS), BLOCK).tobytes(), 0, BLOCK
    )


class Router:
    """Spaces with a registry of two engines, the first on host h1, and a pool."""

    def __init__(self) -> None:
        self.spaces = Spaces(PlainIndex)
        self.spaces.set_registry(registry(engine("one", backend_ids=("h1",)), engine("two"), pool()))

    def apply(
        self,
        *events: IndexEvent,
        sequence: int = 0,
        generation: int = 10,
        publisher: str = "one",
        epoch: int = 1,
        part: int = 0,
        model: str = MODEL,
    ) -> None:
        source = "pool" if publisher == "pool" else "engine"
        group = IndexGroup(sequence, source, publisher, 0, generation, 0, 0, 0.0, list(events), part)  # type: ignore[arg-type]
        for _ in self.spaces.apply(IndexBatch(WIRE_VERSION, model, TENANT, [group], epoch)):
            pass

    def held(self, holder: Holder) -> tuple[int, int, int]:
        space = self.spaces.find(MODEL, TENANT)
        assert space is not None
        return space.blocks_of(holder)[:3]

    def matched(self, name: str = "one", model: str = MODEL) -> int:
        space = self.spaces.find(model, TENANT)
        if space is None:
            return 0
        keys = prefix_keys(content_hashes(token_bytes(TOKENS), BLOCK)).tobytes()
        answers = space.index.match(keys, space.candidates, space.pool_holders)
        by_name = {record.instance_id: sum(answer) for record, answer in zip(space.engines, answers, strict=True)}
        return by_name.get(name, 0)


def test_a_group_is_applied_once_whatever_is_repeated_behind_it() -> None:
    router = Router()
    router.apply(stored(), sequence=5)
    router.apply(IndexRemoved(ONE, Tier.NPU, pack_hashes([1, 2])), sequence=6)
    router.apply(stored(), sequence=5)
    assert router.matched() == 0
    assert router.spaces.counts.repeated_group == 1


def test_parts_of_one_message_are_all_applied_in_order() -> None:
    router = Router()
    router.apply(stored(), sequence=5, part=0)
    router.apply(IndexRemoved(ONE, Tier.NPU, pack_hashes([2])), sequence=5, part=1)
    router.apply(stored(), sequence=5, part=0)
    assert router.matched() == 1


def test_an_events_stream_that_was_made_anew_counts_from_its_own_beginning() -> None:
    router = Router()
    router.apply(stored(), sequence=500, epoch=1)
    router.apply(IndexRemoved(ONE, Tier.NPU, pack_hashes([1, 2])), sequence=1, epoch=2)
    assert router.matched() == 0


def test_a_late_writer_of_a_stream_that_is_gone_changes_nothing() -> None:
    router = Router()
    router.apply(stored(), sequence=5, epoch=2)
    router.apply(IndexRemoved(ONE, Tier.NPU, pack_hashes([1, 2])), sequence=900, epoch=1)
    router.apply(stored(), sequence=5, epoch=2)
    assert router.matched() == 2
    assert router.spaces.counts.repeated_group == 2


def test_what_a_retired_engine_proved_of_a_pool_still_counts_and_what_it_said_of_itself_does_not() -> None:
    router = Router()
    router.apply(generation=12)
    router.apply(stored(), stored(Location("pool", "h1"), Tier.CPU), generation=11)
    assert router.held(Location("pool", "h1")) == (0, 2, 0)
    assert router.spaces.counts.retired_generation == 1
    router.apply(stored(Location("unknown", "h1"), Tier.CPU), generation=11)
    assert router.spaces.counts.retired_generation == 2


def test_posted_events_have_no_place_in_the_stream_and_are_always_applied() -> None:
    router = Router()
    router.apply(stored(), sequence=9)
    router.apply(IndexCleared(ONE, (Tier.NPU,)), sequence=0)
    assert router.matched() == 0


def test_sq_02_a_higher_generation_clears_before_anything_of_it_is_applied() -> None:
    router = Router()
    router.apply(stored())
    router.apply(stored(tier=Tier.CPU))
    router.apply(IndexRemoved(ONE, Tier.NPU, pack_hashes([99])), generation=11)
    assert router.matched() == 0


def test_t16_a_lower_generation_is_discarded_and_counted() -> None:
    router = Router()
    router.apply(generation=12)
    router.apply(stored(), generation=11)
    assert router.matched() == 0
    assert router.spaces.counts.retired_generation == 1


def test_sq_06_an_unregistered_instance_loses_its_blocks_at_once_and_queued_events_do_not_bring_them_back() -> None:
    router = Router()
    router.apply(stored())
    tombstone = RetiredRecord(retired_kind="engine", instance_id="one", model=MODEL, tenant=TENANT, generation=20)
    router.spaces.set_registry(registry(engine("two"), tombstone))
    router.apply(stored(), generation=10)
    router.apply(stored(), generation=20)
    router.spaces.set_registry(registry(engine("one", 21), engine("two")))
    assert router.matched() == 0
    router.apply(stored(), generation=21)
    assert router.matched() == 2


def test_a_new_registration_of_the_same_name_starts_empty() -> None:
    router = Router()
    router.apply(stored())
    router.spaces.set_registry(registry(engine("one", 11), engine("two"), pool()))
    assert router.matched() == 0


def test_a_registration_that_moves_to_another_model_leaves_nothing_behind() -> None:
    router = Router()
    router.apply(stored())
    router.spaces.set_registry(registry(engine("one", 11, model="other"), engine("two"), pool()))
    router.spaces.set_registry(registry(engine("one", 12), engine("two"), pool()))
    assert router.matched() == 0


def test_one_engines_fence_does_not_touch_another() -> None:
    router = Router()
    router.apply(stored())
    router.apply(stored(TWO), publisher="two")
    router.apply(generation=11)
    assert (router.matched("one"), router.matched("two")) == (0, 2)


def test_po_05_a_pools_new_generation_clears_all_its_locations_and_no_worker() -> None:
    router = Router()
    router.apply(stored())
    router.apply(stored(Location("pool", "h1"), Tier.CPU), publisher="pool")
    router.apply(stored(Location("pool", "h2"), Tier.DISK), publisher="pool")
    router.apply(publisher="pool", generation=11)
    assert (router.matched("one"), router.matched("two")) == (2, 0)


def test_a_clear_without_backend_means_every_location_of_that_pool() -> None:
    router = Router()
    for backend in ("h1", "h2"):
        router.apply(stored(Location("pool", backend), Tier.CPU), publisher="pool")
    router.apply(stored(Location("other", "h1"), Tier.DISK), publisher="pool")
    router.apply(IndexCleared(Location("pool", ""), (Tier.CPU, Tier.DISK)), publisher="pool")
    assert [router.held(Location("pool", backend)) for backend in ("h1", "h2")] == [(0, 0, 0), (0, 0, 0)]
    assert router.held(Location("other", "h1")) == (0, 0, 2)


def test_a_pool_that_is_unregistered_takes_its_blocks_with_it() -> None:
    router = Router()
    router.apply(stored(Location("pool", "h1"), Tier.CPU), publisher="pool")
    assert router.matched() == 2
    router.spaces.set_registry(registry(engine("one"), engine("two")))
    assert router.matched() == 0


def test_which_instances_a_location_is_local_to_is_decided_at_query_time() -> None:
    router = Router()
    router.apply(stored(Location("pool", "h7"), Tier.CPU), publisher="pool")
    router.spaces.set_registry(registry(engine("one"), engine("late", backend_ids=("h7",)), pool()))
    space = router.spaces.find(MODEL, TENANT)
    assert space is not None
    keys = prefix_keys(content_hashes(token_bytes(TOKENS), BLOCK)).tobytes()
    answers = space.index.match(keys, space.candidates, space.pool_holders)
    by_name = {record.instance_id: answer for record, answer in zip(space.engines, answers, strict=True)}
    assert (by_name["late"].cpu_local, by_name["one"].cpu_remote) == (2, 2)
    assert set(by_name) == {"late", "one"}


def test_spaces_are_limited_and_empty_ones_that_nobody_wants_go() -> None:
    spaces = Spaces(PlainIndex, max_spaces=2)
    router = Router()
    router.spaces = spaces
    for number in range(4):
        router.apply(stored(), model=f"model-{number}")
    assert len(spaces.spaces) == 2
    assert spaces.counts.refused == 2
    router.apply(IndexCleared(ONE, (Tier.NPU,)), model="model-0")
    spaces.tidy()
    assert list(spaces.spaces) == [("model-1", TENANT)]


def test_losing_the_stream_forgets_blocks_and_keeps_registrations() -> None:
    router = Router()
    router.apply(stored(), sequence=9)
    router.spaces.reset()
    assert router.matched() == 0
    router.apply(stored(), sequence=1)
    assert router.matched() == 2
