"""The matcher accounts for every event, whatever it is and whatever fails; poison costs itself only."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import TimeoutError as NatsTimeoutError
from redis.exceptions import ResponseError

from schemas.blocks import Tier, pack_hashes
from schemas.events import WIRE_VERSION, Cleared, Event, EventBatch, Removed, Stored, decode_index_batch
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from services.matcher import worker
from services.matcher.fences import Fences
from services.matcher.memory_store import MemoryStore
from services.matcher.reporting import Reporter
from services.matcher.settings import MatcherSettings
from services.matcher.worker import Incoming, Matcher, RefusedByStoreError
from services.router.index.plain import PlainIndex
from services.router.spaces import Spaces
from services.runtime.accounts import OTHERS, Accounts
from services.runtime.health import Health
from services.runtime.registry_store import Registry

POISON = pack_hashes([666])


class Stream:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.fails = False

    async def publish(self, subject: str, body: bytes, timeout: float, headers: dict[str, str]) -> None:
        if self.fails:
            raise KeyError("a bug")
        self.bodies.append(body)


class PoisonableStore(MemoryStore):
    """Fails for one hash as a Lua script does that meets what it cannot take."""

    async def apply(self, space: Any, epoch: int, stream: int, messages: Any, now: int) -> Any:
        for message in messages:
            if any(POISON in getattr(operation, "hashes", b"") for operation in message.operations):
                raise ResponseError("ERR Error running script: too many results to unpack")
        return await super().apply(space, epoch, stream, messages, now)


class World:
    def __init__(self) -> None:
        self.fences = Fences()
        engine = EngineRecord(instance_id="a", model="m", block_size=4, generation=5)
        pool = PoolRecord(instance_id="p", model="m", block_size=4, generation=1, endpoint="tcp://p:1")
        gone = RetiredRecord(retired_kind="engine", instance_id="gone", model="m", generation=9)
        self.registry = Registry({("a", 0): engine}, {"p": pool}, (gone,))
        self.fences.set_registry(self.registry)
        self.stream = Stream()
        self.accounts = Accounts(self.fences.has)
        self.matcher = Matcher(
            PoisonableStore(MatcherSettings()),
            self.stream,  # type: ignore[arg-type]
            self.fences,
            Reporter(None),
            Health("test"),
            1,
            77,
            self._no_streams,
            self.accounts,
        )

    async def _no_streams(self) -> None:
        """They are there."""

    async def process(self, *messages: Incoming) -> None:
        await self.matcher.process(messages)

    def totals(self) -> dict[str, int]:
        found = {"received": 0, "applied": 0, "returned": 0}
        for account in dict(self.accounts.items()).values():
            for name in ("received", "applied", "returned"):
                found[name] += getattr(account, name)
            for reason, count in (account.rejected + account.dropped).items():
                found[reason] = found.get(reason, 0) + count
        return found


def message(
    sequence: int, *events: Event, source: str = "engine", name: str = "a", generation: int = 5, known: bool = True
) -> Incoming:
    batch = EventBatch(WIRE_VERSION, source, "m", "default", name, 0, generation, 1, 1, 0.0, 0.0, list(events))  # type: ignore[arg-type]
    return Incoming(sequence, batch, (source, name, 0), known)  # fmt: skip


STORED = Stored(Tier.NPU, pack_hashes([1]), None, pack_hashes([101]), 0, 4)
PROVEN = Stored(Tier.CPU, pack_hashes([1]), backend_id="host")
MALFORMED = Stored(Tier.NPU, b"123")
NOWHERE = Stored(Tier.CPU, pack_hashes([1]))


async def test_every_event_is_in_exactly_one_place() -> None:
    world = World()
    await world.process(
        message(1, STORED, MALFORMED, Removed(Tier.NPU, pack_hashes([1]))),
        message(2, PROVEN, NOWHERE, source="pool", name="p", generation=1),
        message(3, STORED, STORED, name="gone", generation=9),
        message(4, STORED, name="stranger", known=False),
        Incoming(5, None, ("engine", "a", 0)),
        message(6, STORED, generation=4),
    )
    await world.process(message(7))
    await world.process(message(1, STORED, MALFORMED, Removed(Tier.NPU, pack_hashes([1]))))
    assert world.totals() == {
        "received": 13,
        "applied": 3,
        "returned": 0,
        "malformed": 1,
        "no_location": 1,
        "retired_generation": 3,
        "unregistered": 1,
        "unreadable": 1,
        "repeated": 3,
    }
    assert world.accounts.check() == {}
    assert {key for key, _ in world.accounts.items()} == {("engine", "a", 0), ("pool", "p", 0), OTHERS}


async def test_t16_a_strangers_events_change_nothing() -> None:
    world = World()
    await world.process(message(1, STORED, name="stranger", known=False))
    assert world.stream.bodies == []


async def test_a_batch_that_fails_is_returned_and_counted_when_it_comes_again() -> None:
    world = World()
    world.stream.fails = True
    with pytest.raises(KeyError):
        await world.process(message(1, STORED), message(2, STORED))
    assert world.totals() == {"received": 2, "applied": 0, "returned": 2}
    world.stream.fails = False
    await world.process(message(1, STORED), message(2, STORED))
    assert world.totals() == {"received": 4, "applied": 2, "returned": 2}
    assert world.accounts.check() == {}


async def test_t10_what_redis_refuses_however_often_it_is_asked_is_no_reason_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "FIRST_WAIT_SECONDS", 0.001)
    world = World()
    poison = message(2, Stored(Tier.NPU, POISON, None, pack_hashes([9]), 0, 4))
    with pytest.raises(RefusedByStoreError):
        await world.process(message(1, STORED), poison, message(3, STORED))
    await world.process(message(1, STORED))
    with pytest.raises(RefusedByStoreError):
        await world.process(poison)
    world.matcher.give_up(poison)
    await world.process(message(3, STORED))
    assert world.totals() == {"received": 7, "applied": 2, "returned": 4, "failed": 1}
    groups = [group.source_sequence for body in world.stream.bodies for group in decode_index_batch(body).groups]
    assert groups == [1, 3]


@pytest.mark.parametrize(
    "error", [ResponseError("LOADING Redis is loading"), NatsTimeoutError(), ResponseError("OOM command not allowed")]
)
def test_a_server_that_cannot_answer_now_says_nothing_of_the_message(error: Exception) -> None:
    assert not worker._is_refusal(error)  # fmt: skip


events = st.sampled_from(
    [
        STORED,
        PROVEN,
        MALFORMED,
        NOWHERE,
        Removed(Tier.NPU, pack_hashes([1])),
        Cleared((Tier.NPU,)),
        Cleared((Tier.CPU,)),
    ]
)
messages = st.tuples(
    st.lists(events, max_size=5), st.sampled_from(["a", "gone", "p", "stranger"]), st.sampled_from([1, 4, 5, 6, 9])
)


@settings(max_examples=60)
@given(history=st.lists(messages, max_size=12), repeat_from=st.integers(0, 12), size=st.integers(1, 4))
async def test_whatever_comes_the_books_balance_from_hop_to_hop(
    history: list[tuple[list[Event], str, int]], repeat_from: int, size: int
) -> None:
    world = World()
    numbered = []
    for number, (made, name, generation) in enumerate(history, 1):
        source, known = ("pool" if name == "p" else "engine"), name != "stranger"
        numbered.append(message(number, *made, source=source, name=name, generation=generation, known=known))
    for deliveries in (numbered, numbered[repeat_from:]):
        for start in range(0, len(deliveries), size):
            await world.process(*deliveries[start : start + size])
    total = world.totals()
    assert total["received"] == sum(total.values()) - total["received"]
    assert world.accounts.check() == {}
    spaces = Spaces(PlainIndex)
    spaces.set_registry(world.registry)
    sent = 0
    for body in world.stream.bodies:
        batch = decode_index_batch(body)
        sent += sum(len(group.events) for group in batch.groups)
        for _ in spaces.apply(batch):
            pass
    assert sum(account.received for account in dict(spaces.accounts.items()).values()) == sent
    assert spaces.accounts.check() == {}
