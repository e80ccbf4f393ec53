"""Batches through the store to the index stream: crashes, new leaders, bodies that make no sense; both stores."""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import redis.asyncio as redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.blocks import Tier, pack_hashes
from schemas.events import (
    WIRE_VERSION,
    Cleared,
    Event,
    EventBatch,
    IndexCleared,
    IndexEvent,
    IndexStored,
    Location,
    Removed,
    Stored,
    Worker,
    decode_index_batch,
    encode,
)
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from services.matcher.confirmation import finish
from services.matcher.fences import Fences
from services.matcher.memory_store import MemoryStore
from services.matcher.reconcile import batch_problem, plan, problem
from services.matcher.redis_store import RedisStore
from services.matcher.reporting import Reporter
from services.matcher.settings import MatcherSettings
from services.matcher.state import Answer, Prove, Proved, Result, Taught, Teach
from services.matcher.store import MatcherStore
from services.matcher.worker import Incoming, Matcher
from services.router.index import create_index
from services.router.spaces import Spaces
from services.runtime.accounts import Accounts
from services.runtime.health import Health
from services.runtime.logging import configure_logging
from services.runtime.registry_store import Registry
from services.runtime.settings import LoggingSettings
from tests.conftest import ServerProcess

MODEL, TENANT = "m", "default"
CPU = Tier.CPU


class CrashError(Exception):
    """The process dies here."""


class IndexStream:
    """Takes the place of JetStream: keeps what is published, and dies when told to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.dies_in: int | None = None

    async def publish(self, subject: str, body: bytes, timeout: float, headers: dict[str, str]) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise CrashError
        self.bodies.append(body)

    def events(self) -> list[IndexEvent]:
        groups = [group for body in self.bodies for group in decode_index_batch(body).groups]
        return [event for group in groups for event in group.events]

    def confirmed(self) -> list[tuple[Any, bytes]]:
        """(holder, content) of every pool or own-tier block that is in the index with its content."""
        events = [event for event in self.events() if isinstance(event, IndexStored)]
        return [
            (event.holder, event.content_hashes)
            for event in events
            if event.tier is not Tier.NPU and event.content_hashes
        ]


@pytest.fixture(autouse=True)
def quiet() -> None:
    configure_logging("test", LoggingSettings(level="error", kv_events="off"))


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_server: ServerProcess) -> AsyncIterator[MatcherStore]:
    if request.param == "memory":
        yield MemoryStore(MatcherSettings())
        return
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    yield RedisStore(client, MatcherSettings())
    await client.aclose()


async def _no_streams() -> None:
    """The streams of these tests are always there."""


def leader(
    store: MatcherStore, stream: IndexStream, epoch: int = 1, created: int = 77, fences: Fences | None = None
) -> Matcher:
    fences = fences or Fences()
    accounts = Accounts(lambda key: True)
    return Matcher(store, stream, fences, Reporter(None), Health("test"), epoch, created, _no_streams, accounts)  # type: ignore[arg-type]


def batch(*events: Event, source: str = "engine", name: str = "a", generation: int = 1, **more: Any) -> EventBatch:
    return EventBatch(
        WIRE_VERSION,
        source,  # type: ignore[arg-type]
        more.pop("model", MODEL),
        TENANT,
        name,
        0,
        generation,
        0,
        0,
        0.0,
        0.0,
        list(events),
        **more,
    )


def content(*names: int, salt: int = 1000) -> bytes:
    return pack_hashes([name + salt for name in names])


def npu(*names: int, salt: int = 1000) -> Stored:
    return Stored(Tier.NPU, pack_hashes(names), None, content(*names, salt=salt), 0, 4)


def offload(*names: int, tokens: bool = True) -> Stored:
    return Stored(CPU, pack_hashes(names), None, content(*names) if tokens else b"", 0, 4 if tokens else 0)


def pool(*names: int, host: str = "h1") -> Stored:
    return Stored(CPU, pack_hashes(names), backend_id=host)


def from_pool(*events: Event, generation: int = 1) -> EventBatch:
    return batch(*events, source="pool", name="pool", generation=generation)


async def test_a_crash_in_the_message_that_begins_a_generation_does_not_stop_the_next_leader(
    store: MatcherStore,
) -> None:
    stream = IndexStream()
    first = leader(store, stream)
    await first.process([Incoming(1, batch(npu(1), generation=1))])
    stream.dies_in = 0
    message = Incoming(2, batch(npu(2), generation=2))
    with pytest.raises(CrashError):
        await first.process([message])
    stream.dies_in = None
    await leader(store, stream, epoch=2).process([message])
    cleared, stored = stream.events()[-2:]
    assert isinstance(cleared, IndexCleared)
    assert cleared.holder == Worker("a", 0)
    assert isinstance(stored, IndexStored)
    assert stored.engine_hashes == pack_hashes([2])


async def test_what_was_matched_is_published_even_when_its_engine_was_retired_meanwhile(store: MatcherStore) -> None:
    stream = IndexStream()
    messages = [Incoming(1, from_pool(pool(5))), Incoming(2, batch(offload(5)))]
    stream.dies_in = 0
    with pytest.raises(CrashError):
        await leader(store, stream).process(messages)
    stream.dies_in = None
    fences = Fences()
    fences.set_registry(
        Registry(retired=(RetiredRecord(retired_kind="engine", instance_id="a", model=MODEL, generation=9),))
    )
    await leader(store, stream, epoch=2, fences=fences).process(messages)
    assert stream.confirmed() == [(Location("pool", "h1"), content(5))]


async def test_a_stream_that_was_made_anew_is_read_from_its_first_message(store: MatcherStore) -> None:
    stream = IndexStream()
    old = leader(store, stream, created=77)
    for sequence in range(1, 6):
        await old.process([Incoming(sequence, batch(npu(sequence)))])
    stream.bodies.clear()
    new = leader(store, stream, epoch=2, created=99)
    await new.process([Incoming(1, batch(npu(41))), Incoming(2, batch(npu(42)))])
    assert [event.engine_hashes for event in stream.events() if isinstance(event, IndexStored)] == [
        pack_hashes([41]),
        pack_hashes([42]),
    ]


async def test_a_pool_restart_first_seen_by_a_new_leader_ends_what_the_old_life_waited_for(
    store: MatcherStore,
) -> None:
    stream = IndexStream()
    await leader(store, stream).process([Incoming(1, from_pool(pool(5), generation=1))])
    await leader(store, stream, epoch=2).process(
        [Incoming(2, from_pool(pool(9), generation=2)), Incoming(3, batch(offload(5)))]
    )
    assert stream.confirmed() == []


async def test_a_new_generation_ends_the_old_one_in_every_space_it_was_heard_of(store: MatcherStore) -> None:
    stream = IndexStream()
    elsewhere = Stored(CPU, pack_hashes([5]), backend_id="h1", model="other")
    await leader(store, stream).process([Incoming(1, from_pool(elsewhere, generation=1))])
    await leader(store, stream, epoch=2).process(
        [Incoming(2, from_pool(pool(9), generation=2)), Incoming(3, batch(offload(5), model="other"))]
    )
    assert stream.confirmed() == []


async def test_events_below_the_registrations_generation_are_discarded(store: MatcherStore) -> None:
    stream = IndexStream()
    fences = Fences()
    record = EngineRecord(instance_id="a", model=MODEL, block_size=4, generation=5)
    fences.set_registry(Registry(engines={("a", 0): record}))
    await leader(store, stream, fences=fences).process(
        [Incoming(1, batch(npu(1), generation=4)), Incoming(2, batch(npu(2), generation=5))]
    )
    assert [event.engine_hashes for event in stream.events() if isinstance(event, IndexStored)] == [pack_hashes([2])]


async def test_an_unregistered_pool_is_taken_out_of_the_index_even_behind_a_late_confirmation(
    store: MatcherStore,
) -> None:
    """A confirmation travels in the engine's name, so the router cannot tell that its pool is gone."""
    stream = IndexStream()
    router = Spaces(lambda: create_index("plain", 10_000, 1_000))
    engine = EngineRecord(instance_id="a", model=MODEL, block_size=4, generation=1)
    record = PoolRecord(instance_id="pool", model=MODEL, block_size=4, generation=1, endpoint="tcp://h:1")
    engines = {("a", 0): engine}
    router.set_registry(Registry(engines, {"pool": record}))
    fences = Fences()
    working = leader(store, stream, fences=fences)
    await working.process([Incoming(1, from_pool(pool(5)))])
    tombstone = RetiredRecord(retired_kind="pool", instance_id="pool", model=MODEL, generation=2)
    router.set_registry(Registry(engines, {}, (tombstone,)))
    await working.process([Incoming(2, batch(offload(5)))])
    gone = fences.set_registry(Registry(engines, {}, (tombstone,)))
    assert gone == [tombstone]
    await working.forget(gone)
    for body in stream.bodies:
        for _ in router.apply(decode_index_batch(body)):
            pass
    assert stream.confirmed() == [(Location("pool", "h1"), content(5))]
    space = router.find(MODEL, TENANT)
    assert space is not None
    assert space.blocks_of(Location("pool", "h1")) == (0, 0, 0, 0)


async def test_names_of_two_workers_never_meet_in_their_own_tiers(store: MatcherStore) -> None:
    stream = IndexStream()
    await leader(store, stream).process(
        [
            Incoming(1, batch(npu(11, salt=500), own_tiers=(CPU,))),
            Incoming(2, batch(npu(11, salt=700), name="b", own_tiers=(CPU,))),
            Incoming(3, batch(offload(11, tokens=False), own_tiers=(CPU,))),
        ]
    )
    assert stream.confirmed() == [(Worker("a", 0), content(11, salt=500))]


async def test_one_engines_offload_removal_leaves_what_another_engine_said(store: MatcherStore) -> None:
    stream = IndexStream()
    await leader(store, stream).process(
        [
            Incoming(1, batch(offload(5))),
            Incoming(2, batch(Removed(CPU, pack_hashes([5])), name="b")),
            Incoming(3, from_pool(pool(5))),
        ]
    )
    assert stream.confirmed() == [(Location("pool", "h1"), content(5))]


async def test_an_engine_without_a_pool_teaches_no_pool(store: MatcherStore) -> None:
    stream = IndexStream()
    await leader(store, stream).process(
        [Incoming(1, batch(npu(5), pool_expected=False)), Incoming(2, from_pool(pool(5)))]
    )
    assert stream.confirmed() == []


async def test_a_pools_npu_memory_never_becomes_a_tier_of_the_index(store: MatcherStore) -> None:
    stream = IndexStream()
    await leader(store, stream).process(
        [Incoming(1, batch(npu(5))), Incoming(2, from_pool(Stored(Tier.NPU, pack_hashes([5]), backend_id="h1")))]
    )
    assert [event.holder for event in stream.events()] == [Worker("a", 0)]


MALFORMED = {
    "odd_hashes": Stored(Tier.NPU, b"1234567", None, b"1234567", 0, 4),
    "no_hashes": Stored(Tier.NPU, b"", None, b"", 0, 4),
    "too_few_contents": Stored(Tier.NPU, pack_hashes([1, 2]), None, pack_hashes([5]), 0, 4),
    "negative_parent": Stored(Tier.NPU, pack_hashes([1]), -5, pack_hashes([5]), 0, 4),
    "negative_root": Stored(CPU, pack_hashes([1]), None, pack_hashes([5]), -1, 4),
    "odd_removal": Removed(CPU, b"123"),
    "nul_in_a_name": Cleared((CPU,), "h\0"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_t10_an_event_that_decodes_but_makes_no_sense_costs_itself_alone(store: MatcherStore, name: str) -> None:
    stream = IndexStream()
    assert problem(MALFORMED[name])
    mixed = batch(npu(6), MALFORMED[name], npu(7))
    await leader(store, stream).process([Incoming(1, mixed), Incoming(2, batch(npu(8)))])
    stored = [event.engine_hashes for event in stream.events() if isinstance(event, IndexStored)]
    assert stored == [pack_hashes([6]), pack_hashes([7]), pack_hashes([8])]


integers = st.integers(-(2**63), 2**64 - 1)
names = st.text(max_size=3)
tiers = st.sampled_from(list(Tier))
events = st.one_of(
    st.builds(
        Stored,
        tiers,
        st.binary(max_size=24),
        st.none() | integers,
        st.binary(max_size=24),
        integers,
        integers,
        names,
        names,
        names,
    ),
    st.builds(Removed, tiers, st.binary(max_size=24), names, names, names),
    st.builds(Cleared, st.lists(tiers, max_size=3).map(tuple), names, names, names),
)


@given(
    st.sampled_from(["engine", "pool"]),
    names,
    integers,
    integers,
    st.lists(events, max_size=4),
    st.lists(tiers, max_size=2).map(tuple),
    st.booleans(),
)
def test_whatever_can_be_decoded_is_either_refused_or_reconciled(
    source: str, name: str, rank: int, generation: int, some: list[Event], own: tuple[Tier, ...], pooled: bool
) -> None:
    body = EventBatch(
        WIRE_VERSION, source, MODEL, TENANT, name, rank, generation, 0, 0, 0.0, 0.0, some, own, True, pooled  # type: ignore[arg-type]
    )  # fmt: skip
    if batch_problem(body):
        return
    for steps in plan(body).values():
        results: list[Result] = [
            Taught() if isinstance(operation, Teach)
            else Proved((None,) * (len(operation.hashes) // 8)) if isinstance(operation, Prove)
            else None
            for operation in steps.operations()
        ]  # fmt: skip
        group, _ = finish(body, 1, steps, Answer(tuple(results)).results)
        assert all(isinstance(event, IndexCleared) or len(event.engine_hashes) % 8 == 0 for event in group.events)


def _random_batch(chance: random.Random, clock: int) -> EventBatch:
    """Two engines, each in a space of its own, and a pool that serves both; everybody restarts from time to time."""
    some = tuple(chance.sample(range(1, 7), chance.randint(1, 3)))
    generation = 1 + clock // 30
    if chance.random() < 0.5:
        removed = Removed(chance.choice([Tier.NPU, CPU]), pack_hashes(some))
        event: Event = chance.choice([npu(*some), offload(*some), removed])
        name, model = chance.choice([("a", MODEL), ("b", "other")])
        return batch(event, name=name, generation=generation, counted=True, model=model)
    host, model = chance.choice(["h1", "h2"]), chance.choice([MODEL, "other"])
    event = chance.choice(
        [pool(*some, host=host), Removed(CPU, pack_hashes(some), host), Cleared((CPU,), host), pool(*some, host=host)]
    )
    return batch(event, source="pool", name="pool", generation=generation, model=model)


def _blocks(stream: IndexStream) -> object:
    """Blocks per holder and space after everything published was applied by a router."""
    router = Spaces(lambda: create_index("plain", 10_000, 1_000))
    for body in stream.bodies:
        for _ in router.apply(decode_index_batch(body)):
            pass
    holders: Sequence[Any] = [Worker("a", 0), Worker("b", 0), Location("pool", "h1"), Location("pool", "h2")]
    return {key: [space.blocks_of(holder) for holder in holders] for key, space in sorted(router.spaces.items())}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
async def test_crashes_between_redis_and_nats_and_batches_cut_anew_change_nothing(
    seed: int, make_stores: Callable[[], Any]
) -> None:
    chance = random.Random(seed)
    history = [Incoming(number, _random_batch(chance, number)) for number in range(1, 80)]
    store, other = await make_stores()
    undisturbed = IndexStream()
    calm = leader(store, undisturbed)
    for message in history:
        await calm.process([message])
    disturbed = IndexStream()
    position, epoch = 0, 1
    working = leader(other, disturbed)
    while position < len(history):
        some = history[position : position + chance.randint(1, 9)]
        disturbed.dies_in = chance.choice([None, 0, 1, 2]) if chance.random() < 0.4 else None
        try:
            await working.process(some)
        except CrashError:
            epoch += 1
            working = leader(other, disturbed, epoch)
            continue
        if chance.random() < 0.9:
            position += len(some)
        else:  # it died before it noted how far it had come
            epoch += 1
            working = leader(other, disturbed, epoch)
    assert _blocks(disturbed) == _blocks(undisturbed)


@pytest.fixture(params=["memory", "redis"])
async def make_stores(request: pytest.FixtureRequest, redis_server: ServerProcess) -> AsyncIterator[Callable[[], Any]]:
    client = redis.from_url(redis_server.url)

    async def make() -> tuple[MatcherStore, MatcherStore]:
        if request.param == "memory":
            return MemoryStore(MatcherSettings()), MemoryStore(MatcherSettings())
        await client.flushdb()
        one, other = MatcherSettings(key_prefix="one"), MatcherSettings(key_prefix="other")
        return RedisStore(client, one), RedisStore(client, other)

    yield make
    await client.aclose()


def test_a_body_that_is_no_batch_of_any_publisher_is_refused_with_its_field() -> None:
    assert "generation" in batch_problem(batch(generation=-1))
    assert "instance_id" in batch_problem(batch(name=""))
    assert encode(batch())
