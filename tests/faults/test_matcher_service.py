"""The matcher as processes, between a real NATS and a real Redis that may go away."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NoStreamResponseError, NotFoundError

from schemas.blocks import Tier, content_hashes, pack_hashes, prefix_keys, token_bytes
from schemas.events import (
    WIRE_VERSION,
    Event,
    EventBatch,
    Location,
    Removed,
    StateNote,
    Stored,
    decode_index_batch,
    decode_state_note,
    encode,
)
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from schemas.subjects import INDEX_STREAM, events_subject
from services.router.index.plain import PlainIndex
from services.router.index.port import Coverage
from services.router.spaces import Spaces
from services.runtime.broker import ensure_streams
from services.runtime.registry_store import Registry, RegistryStore
from services.runtime.settings import NatsSettings
from tests.conftest import ServerProcess, free_port, make_nats_server, make_redis_server

MODEL, BLOCK = "m", 4
HOSTS = ("10.0.0.1", "10.0.0.2")


@dataclass
class MatcherProcess:
    port: int
    process: subprocess.Popen[bytes]

    async def report(self) -> dict[str, object]:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"http://127.0.0.1:{self.port}/readyz", timeout=2.0)
        report: dict[str, object] = answer.json()
        return report

    async def at_work(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return "at work, epoch" in str((await self.report())["notes"])
        return False

    async def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return bool((await self.report())["ready"])
        return False


class World:
    """Servers of its own, matchers, and a view of what they put into the index stream."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("nats", "redis"):
            (folder / name).mkdir()
        self.nats = make_nats_server(folder / "nats")
        self.redis = make_redis_server(folder / "redis")
        self.matchers: list[MatcherProcess] = []
        self.client: Client
        self.seq = 0

    async def start(self) -> None:
        for server in (self.nats, self.redis):
            await asyncio.to_thread(server.start)
        self.client = await nats.connect(self.nats.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        await ensure_streams(self.client.jetstream(), NatsSettings())
        await self.register()

    async def register(self) -> None:
        """The publishers of these tests' messages."""
        store = RegistryStore(self.client.jetstream())
        for name in ("one", "two"):
            await store.put(EngineRecord(instance_id=name, model=MODEL, block_size=BLOCK, generation=1))
        pool = PoolRecord(instance_id="pool", model=MODEL, block_size=BLOCK, generation=1, endpoint="tcp://pool:5557")
        await store.put(pool)

    def start_matcher(self, **environment: str) -> MatcherProcess:
        port = free_port()
        variables = {
            "KVROUTE_NATS__URL": self.nats.url,
            "KVROUTE_REDIS__URL": self.redis.url,
            "KVROUTE_MATCHER__PORT": str(port),
            "KVROUTE_MATCHER__LEASE_TTL": "2",
        }
        log = (self.folder / f"matcher-{port}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "services.matcher"], env=os.environ | variables | environment, stdout=log, stderr=log
        )
        self.matchers.append(MatcherProcess(port, process))
        return self.matchers[-1]

    async def stop(self) -> None:
        for matcher in self.matchers:
            matcher.process.kill()
            matcher.process.wait()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.client.close(), 2)
        for server in (self.nats, self.redis):
            server.stop()

    async def send(self, source: str, name: str, *events: Event, generation: int = 1) -> None:
        self.seq += 1
        batch = EventBatch(
            WIRE_VERSION,
            source,
            MODEL,
            "default",
            name,
            0,
            generation,
            self.seq,
            self.seq,
            0.0,
            time.time(),
            list(events),  # type: ignore[arg-type]
        )
        await self.client.jetstream().publish(events_subject(source, MODEL, name, 0), encode(batch))

    async def spaces(self) -> Spaces:
        """What a fresh router makes of the whole index stream."""
        spaces = Spaces(PlainIndex)
        engines = {
            (name, 0): EngineRecord(instance_id=name, model=MODEL, block_size=BLOCK, backend_ids=(host,))
            for name, host in zip(("one", "two"), HOSTS, strict=True)
        }
        spaces.set_registry(Registry(engines))
        js = self.client.jetstream()
        info = await js.stream_info(INDEX_STREAM)
        if info.state.messages:
            config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
            subscription = await js.subscribe("kv.index.>", ordered_consumer=True, config=config)
            sequence = 0
            while sequence < info.state.last_seq:
                message = await subscription.next_msg(timeout=5)
                sequence = message.metadata.sequence.stream
                for _ in spaces.apply(decode_index_batch(message.data)):
                    pass
            await subscription.unsubscribe()
        for space in spaces.spaces.values():
            assert space.index.audit() == []
        return spaces

    async def applied(self) -> int:
        """The last source sequence that the index stream carries."""
        return max((space.last_sequence[0] for space in (await self.spaces()).spaces.values()), default=0)


def answers(spaces: Spaces, prompts: list[list[int]]) -> list[list[Coverage]]:
    space = spaces.find(MODEL, "default")
    assert space is not None
    keys = [prefix_keys(content_hashes(token_bytes(prompt), BLOCK)).tobytes() for prompt in prompts]
    return [space.index.match(key, space.candidates, space.pool_holders) for key in keys]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.start()
    yield world
    await world.stop()


async def until(condition: Callable[[], object], what: str, seconds: float = 25.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.05)


async def at_work(world: World) -> MatcherProcess:
    """The one replica that works, once there is one."""
    found: list[MatcherProcess] = []

    async def one() -> bool:
        found[:] = [m for m in world.matchers if m.process.poll() is None and await m.at_work()]
        return len(found) == 1

    await until(one, "working replica")
    return found[0]


def tokens(number: int, blocks: int = 3) -> list[int]:
    return [number * 1000 + i for i in range(blocks * BLOCK)]


def names(number: int, blocks: int = 3) -> list[int]:
    return [number * 10 + i + 1 for i in range(blocks)]


def stored(number: int, tier: Tier = Tier.NPU) -> Stored:
    contents = content_hashes(token_bytes(tokens(number)), BLOCK).tobytes()
    return Stored(tier, pack_hashes(names(number)), None, contents, 0, BLOCK)


def history(seed: int, length: int) -> Iterator[tuple[str, str, Event]]:
    """A random mix of engine and pool events over 12 chains."""
    chance = random.Random(seed)
    for _ in range(length):
        number = chance.randrange(12)
        packed = pack_hashes(names(number))
        kind = chance.random()
        if kind < 0.35:
            yield "engine", chance.choice(["one", "two"]), stored(number)
        elif kind < 0.5:
            yield "engine", chance.choice(["one", "two"]), stored(number, Tier.CPU)
        elif kind < 0.6:
            yield "engine", chance.choice(["one", "two"]), Removed(Tier.NPU, packed)
        elif kind < 0.9:
            yield "pool", "pool", Stored(Tier.CPU, packed, backend_id=chance.choice(HOSTS))
        else:
            yield "pool", "pool", Removed(Tier.CPU, packed, backend_id=chance.choice(HOSTS))


PROMPTS = [tokens(number) for number in range(12)]


async def test_the_service_confirms_what_both_sides_said_and_taps_every_state(world: World) -> None:
    notes: list[StateNote] = []

    async def receive(message: object) -> None:
        notes.append(decode_state_note(message.data))  # type: ignore[attr-defined]

    await world.client.subscribe("kv.state.>", cb=receive)
    matcher = world.start_matcher(KVROUTE_MATCHER__PENDING_TTL="0.5", KVROUTE_MATCHER__SWEEP_INTERVAL="0.1")
    await until(matcher.ready, "readiness")
    await world.send("engine", "one", stored(1, Tier.CPU))
    await world.send("pool", "pool", Stored(Tier.CPU, pack_hashes(names(1)), backend_id=HOSTS[0]))
    await world.send("pool", "pool", Stored(Tier.CPU, pack_hashes(names(2)), backend_id=HOSTS[0]))
    await until(
        lambda: {"offload_cached", "confirmed", "queued", "pending_expired"} <= {n.state for n in notes}, "states"
    )
    (expired,) = [note for note in notes if note.state == "pending_expired"]
    assert (expired.blocks, expired.medium, expired.model) == (3, "cpu", MODEL)
    assert len(expired.preview) == 3
    assert answers(await world.spaces(), [tokens(1)]) == [[Coverage(0, 3, 0, 0, 0), Coverage(0, 0, 3, 0, 0)]]
    async with httpx.AsyncClient(trust_env=False) as http:
        page = await http.get(f"http://127.0.0.1:{matcher.port}/asyncapi.json")
        metrics = (await http.get(f"http://127.0.0.1:{matcher.port}/metrics")).text
    addresses = {channel["address"] for channel in page.json()["channels"].values()}
    assert {"kv.events.>", "kv.index.>", "kv.state.matched.*", "kv.dead.>", "kv.control.>"} <= addresses
    assert 'kvroute_matcher_blocks_total{medium="cpu",state="pending_expired"} 3.0' in metrics
    matcher.process.send_signal(signal.SIGTERM)
    assert matcher.process.wait(timeout=15) == 0


async def test_t10_a_body_that_cannot_be_read_is_put_aside_and_the_stream_goes_on(world: World) -> None:
    dead: list[bytes] = []

    async def receive(message: object) -> None:
        dead.append(message.data)  # type: ignore[attr-defined]

    await world.client.subscribe("kv.dead.>", cb=receive)
    matcher = world.start_matcher()
    await until(matcher.ready, "readiness")
    await world.client.jetstream().publish("kv.events.engine.m.one.0", b"\xc1 poison")
    await world.send("engine", "one", stored(1))

    async def applied() -> bool:
        return await world.applied() == 2

    await until(applied, "the message after the poison")
    await until(lambda: dead == [b"\xc1 poison"], "the poison on kv.dead")


async def test_two_matchers_at_once_give_the_same_index_as_one_even_when_the_working_one_is_killed(
    world: World,
) -> None:
    events = list(history(seed=5, length=400))
    first, second = world.start_matcher(), world.start_matcher()
    await until(first.ready, "readiness")
    await until(second.ready, "readiness")
    sent = 0
    for number, (source, name, event) in enumerate(events):
        await world.send(source, name, event)
        sent += 1
        if number in (120, 260):
            working = await at_work(world)
            working.process.kill()
            working.process.wait()
            replacement = world.start_matcher()
            await until(replacement.ready, "readiness of a new replica")

    async def done() -> bool:
        return await world.applied() == sent

    await until(done, "the whole history in the index")
    both = answers(await world.spaces(), PROMPTS)

    alone = World(world.folder / "alone") if (world.folder / "alone").mkdir() is None else None
    assert alone is not None
    try:
        await alone.start()
        single = alone.start_matcher()
        await until(single.ready, "readiness")
        for source, name, event in events:
            await alone.send(source, name, event)

        async def alone_done() -> bool:
            return await alone.applied() == sent

        await until(alone_done, "the whole history in the index")
        assert answers(await alone.spaces(), PROMPTS) == both
    finally:
        await alone.stop()
    assert any(sum(coverage) for row in both for coverage in row)


async def test_a_graceful_stop_hands_over_at_once(world: World) -> None:
    first = world.start_matcher(KVROUTE_MATCHER__LEASE_TTL="30")
    await until(first.at_work, "work")
    second = world.start_matcher(KVROUTE_MATCHER__LEASE_TTL="1")
    await until(second.ready, "readiness")
    assert not await second.at_work()
    before = time.monotonic()
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(timeout=15) == 0
    await until(second.at_work, "take-over")
    assert time.monotonic() - before < 10


@pytest.mark.parametrize("server_name", ["redis", "nats"])
async def test_nothing_is_lost_while_a_server_is_away(world: World, server_name: str) -> None:
    matcher = world.start_matcher()
    await until(matcher.ready, "readiness")
    events = list(history(seed=9, length=90))
    server: ServerProcess = world.redis if server_name == "redis" else world.nats
    for source, name, event in events[:30]:
        await world.send(source, name, event)
    await asyncio.to_thread(server.kill)
    if server_name == "redis":
        for source, name, event in events[30:60]:
            await world.send(source, name, event)

        async def says_so() -> bool:
            return "redis" in str((await matcher.report())["conditions"]) and not await matcher.ready()

        await until(says_so, "a reason in /readyz")
    await asyncio.to_thread(server.start)
    if server_name == "nats":
        await until(lambda: world.client.is_connected, "connection to NATS")
        for source, name, event in events[30:60]:
            await world.send(source, name, event)
    for source, name, event in events[60:]:
        await world.send(source, name, event)

    async def done() -> bool:
        return await world.applied() == len(events)

    await until(done, "the whole history in the index", 40)
    await until(matcher.ready, "readiness again")
    got = answers(await world.spaces(), PROMPTS)
    reference = World(world.folder / "reference") if (world.folder / "reference").mkdir() is None else None
    assert reference is not None
    try:
        await reference.start()
        other = reference.start_matcher()
        await until(other.ready, "readiness")
        for source, name, event in events:
            await reference.send(source, name, event)

        async def reference_done() -> bool:
            return await reference.applied() == len(events)

        await until(reference_done, "the whole history in the index")
        assert answers(await reference.spaces(), PROMPTS) == got
    finally:
        await reference.stop()


async def test_t16_events_of_a_retired_instance_or_generation_are_discarded(world: World) -> None:
    store = RegistryStore(world.client.jetstream())
    await store.retire(RetiredRecord(retired_kind="engine", instance_id="one", model=MODEL, generation=5))
    matcher = world.start_matcher()
    await until(matcher.ready, "readiness")
    await world.send("engine", "one", stored(1), generation=5)
    await world.send("engine", "two", stored(2), generation=7)
    await world.send("engine", "two", stored(3), generation=6)
    await world.send("engine", "one", stored(4), generation=6)

    async def done() -> bool:
        return await world.applied() == 4

    await until(done, "the last message")
    got = answers(await world.spaces(), [tokens(number) for number in (1, 2, 3, 4)])
    assert [[coverage.npu for coverage in row] for row in got] == [[0, 0], [0, 3], [0, 0], [3, 0]]


async def test_a_pools_new_generation_forgets_what_waited(world: World) -> None:
    matcher = world.start_matcher()
    await until(matcher.ready, "readiness")
    await world.send("pool", "pool", Stored(Tier.CPU, pack_hashes(names(1)), backend_id=HOSTS[0]), generation=1)
    await world.send("pool", "pool", Stored(Tier.CPU, pack_hashes(names(2)), backend_id=HOSTS[0]), generation=2)
    await world.send("engine", "one", stored(1, Tier.CPU))
    await world.send("engine", "one", stored(2, Tier.CPU))

    async def done() -> bool:
        return await world.applied() == 4

    await until(done, "the last message")
    got = answers(await world.spaces(), [tokens(1), tokens(2)])
    assert [row[0].cpu_local for row in got] == [0, 3]
    assert Location("pool", HOSTS[0]).backend_id == HOSTS[0]


@pytest.mark.parametrize("stream", ["KV_EVENTS", "KV_INDEX"])
async def test_na_10_a_stream_deleted_by_hand_is_made_anew_and_the_work_goes_on(world: World, stream: str) -> None:
    matcher = world.start_matcher()
    await until(matcher.ready, "readiness")
    for number in (1, 2, 3):
        await world.send("engine", "one", stored(number))

    async def three() -> bool:
        return await world.applied() == 3

    await until(three, "three messages")
    js = world.client.jetstream()
    await js.delete_stream(stream)

    async def sent_again() -> bool:
        try:
            await world.send("engine", "one", stored(4))
        except NoStreamResponseError:
            return False
        return True

    await until(sent_again, "a stream to send to")

    async def arrived() -> bool:
        with contextlib.suppress(NotFoundError):
            (row,) = answers(await world.spaces(), [tokens(4)])
            return row[0].npu == 3
        return False

    await until(arrived, "the message after the deletion")
