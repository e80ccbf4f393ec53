"""What reaches the matcher from the stream, whatever happens to connection, consumer and stream; real servers."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
import redis.asyncio as redis
from nats.aio.client import Client
from nats.errors import TimeoutError as NothingYetError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig
from pydantic import SecretStr

from schemas.blocks import Tier, pack_hashes
from schemas.events import (
    WIRE_VERSION,
    EventBatch,
    IndexCleared,
    Stored,
    decode_event_batch,
    decode_index_batch,
    encode,
)
from schemas.registry import EngineRecord
from schemas.subjects import DEAD_STREAM, EVENTS_ALL, EVENTS_STREAM, INDEX_STREAM, MATCHER_CONSUMER, events_subject
from services.matcher import worker
from services.matcher.app import start
from services.matcher.settings import MatcherSettings
from services.matcher.standing_pull import StandingPull
from services.matcher.subscription import sequence_of
from services.runtime.broker import ensure_streams
from services.runtime.config import Config
from services.runtime.dead_letters import REASON_HEADER, SEQUENCE_HEADER, SUBJECT_HEADER
from services.runtime.health import Health
from services.runtime.kv_watch import KvWatch
from services.runtime.registry_store import RegistryStore
from services.runtime.settings import NatsSettings, RedisSettings
from services.runtime.tasks import end_tasks
from tests.conftest import ServerProcess

SUBJECT = events_subject("engine", "m", "a", 0)
POLL_SECONDS = 0.02
ACKNOWLEDGEMENT = re.compile(rb"PUB \$JS\.ACK\.[^\r]*\r\n[^\r]*\r\n")


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < ends, f"no {what} within {seconds} s"
        await asyncio.sleep(POLL_SECONDS)


def body(number: int, event: Stored | None = None) -> bytes:
    name = pack_hashes([number])
    stored = event or Stored(Tier.NPU, name, None, pack_hashes([number + 1000]), 0, 4)
    return encode(
        EventBatch(WIRE_VERSION, "engine", "m", "default", "a", 0, 1, number, number, 0.0, time.time(), [stored])
    )


async def register(js: JetStreamContext) -> None:
    """The publisher of these tests' messages."""
    await RegistryStore(js).put(EngineRecord(instance_id="a", model="m", block_size=4, generation=1))


class Proxy:
    """Stands between a client and a server; can swallow what the server sends, lose acknowledgements, and break every
    connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.swallows = False
        self.loses_acknowledgements = False
        self.port = 0

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *failure: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pump(reader, far_writer, False), self._pump(far_reader, writer, True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, from_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if self.loses_acknowledgements and not from_server:
                    data = ACKNOWLEDGEMENT.sub(b"", data)
                if not (from_server and self.swallows):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@pytest.fixture
async def js(nats_client: Client, redis_server: ServerProcess) -> JetStreamContext:
    client = redis.from_url(redis_server.url)
    await client.flushall()
    await client.aclose()
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings())
    await register(js)
    return js


@contextlib.asynccontextmanager
async def matcher(port: int, redis_server: ServerProcess) -> AsyncIterator[Health]:
    """A running matcher, connected to NATS through this port and at work."""
    health = Health("matcher")
    config = Config(
        nats=NatsSettings(url=f"nats://127.0.0.1:{port}"),
        redis=RedisSettings(url=SecretStr(redis_server.url)),
        matcher=MatcherSettings(host="127.0.0.1", port=0, lease_ttl=1.5),
    )
    async with start(config, health):

        async def ready() -> bool:
            return health.ready

        await until(ready, "readiness")
        yield health


async def indexed(js: JetStreamContext) -> list[int]:
    """First engine hash of every index event, in stream order."""
    info = await js.stream_info(INDEX_STREAM)
    if not info.state.messages:
        return []
    found: list[int] = []
    for sequence in range(info.state.first_seq, info.state.last_seq + 1):
        message = await js.get_msg(INDEX_STREAM, sequence)
        for group in decode_index_batch(message.data or b"").groups:
            events = [event for event in group.events if not isinstance(event, IndexCleared)]
            found += [int.from_bytes(event.engine_hashes[:8], "little") for event in events]
    return found


async def until_indexed(js: JetStreamContext, *numbers: int, seconds: float = 20.0) -> None:
    async def there() -> bool:
        return set(numbers) <= set(await indexed(js))

    await until(there, f"{numbers} in the index", seconds)


@contextlib.asynccontextmanager
async def cpu_share() -> AsyncIterator[Callable[[], float]]:
    """CPU of this process per second of the block."""
    before, began = os.times(), time.monotonic()
    after: list[float] = []
    yield lambda: after[0]
    now = os.times()
    after.append((now.user + now.system - before.user - before.system) / (time.monotonic() - began))


async def test_messages_that_went_down_with_a_connection_are_delivered_again_in_their_place(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext
) -> None:
    """JetStream counts what it sent into a broken connection as delivered, and acknowledges it with the rest."""
    async with Proxy(nats_server.port) as proxy, matcher(proxy.port, redis_server):
        await js.publish(SUBJECT, body(1))
        await until_indexed(js, 1)
        proxy.swallows = True
        for number in range(2, 40):
            await js.publish(SUBJECT, body(number))
        proxy.cut()
        proxy.swallows = False
        for number in range(40, 60):
            await js.publish(SUBJECT, body(number))
        await until_indexed(js, *range(1, 60), seconds=40)
        assert list(dict.fromkeys(await indexed(js))) == list(range(1, 60))


async def test_na_09_messages_whose_acknowledgement_was_lost_are_skipped_and_acknowledged_when_they_come_again(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.matcher.subscription.ACK_WAIT_SECONDS", 1.0)
    async with Proxy(nats_server.port) as proxy, matcher(proxy.port, redis_server):
        proxy.loses_acknowledgements = True
        for number in range(1, 6):
            await js.publish(SUBJECT, body(number))
        await until_indexed(js, *range(1, 6))
        last = (await js.stream_info(EVENTS_STREAM)).state.last_seq
        assert (await js.consumer_info(EVENTS_STREAM, MATCHER_CONSUMER)).num_ack_pending > 0
        proxy.loses_acknowledgements = False

        async def acknowledged() -> bool:
            info = await js.consumer_info(EVENTS_STREAM, MATCHER_CONSUMER)
            return info.num_ack_pending == 0 and info.ack_floor is not None and info.ack_floor.stream_seq == last

        await until(acknowledged, "acknowledgement")
        assert await indexed(js) == list(range(1, 6))


async def test_na_10_a_deleted_stream_is_made_anew_and_followed_again_at_little_cost(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext
) -> None:
    async with matcher(nats_server.port, redis_server):
        for number in range(1, 10):
            await js.publish(SUBJECT, body(number))
        await until_indexed(js, 9)
        await js.delete_stream(EVENTS_STREAM)
        async with cpu_share() as share:

            async def there_again() -> bool:
                return EVENTS_STREAM in {info.config.name for info in await js.streams_info()}

            await until(there_again, "new KV_EVENTS")
        assert share() < 0.5
        for number in (41, 42):
            await js.publish(SUBJECT, body(number))
        await until_indexed(js, 41, 42)


async def test_na_10_a_deleted_consumer_is_made_anew_and_nothing_is_lost(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext
) -> None:
    async with matcher(nats_server.port, redis_server):
        await js.publish(SUBJECT, body(1))
        await until_indexed(js, 1)
        await js.delete_consumer(EVENTS_STREAM, "matcher")
        await js.publish(SUBJECT, body(2))
        await until_indexed(js, 2)


async def test_messages_that_the_stream_has_dropped_are_skipped_without_a_change_of_leader(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext
) -> None:
    for number in range(1, 20):
        await js.publish(SUBJECT, body(number))
    await js.purge_stream(EVENTS_STREAM)
    client = redis.from_url(redis_server.url)
    async with matcher(nats_server.port, redis_server):
        epoch = await client.get("kvroute:matcher:{leader}:epoch")
        await asyncio.sleep(7.5)  # longer than a stalled subscription is tolerated
        await js.publish(SUBJECT, body(20))
        await until_indexed(js, 20)
        assert await client.get("kvroute:matcher:{leader}:epoch") == epoch
    await client.aclose()


async def test_t10_a_body_that_makes_no_sense_is_kept_under_kv_dead_and_the_stream_goes_on(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext
) -> None:
    bad = body(1, Stored(Tier.NPU, b"1234567", None, b"1234567", 0, 4))
    async with matcher(nats_server.port, redis_server):
        await js.publish(SUBJECT, bad)
        await js.publish(SUBJECT, body(7))
        await until_indexed(js, 7)
        dead = await js.stream_info(DEAD_STREAM)
        assert dead.state.messages == 1
        assert (await js.get_msg(DEAD_STREAM, dead.state.last_seq)).data == bad


@pytest.fixture
async def pull(nats_client: Client, js: JetStreamContext) -> AsyncIterator[StandingPull]:
    await js.add_consumer(EVENTS_STREAM, ConsumerConfig(durable_name="test", filter_subject=EVENTS_ALL))
    pull = StandingPull(nats_client, EVENTS_STREAM, "test", 8)
    await pull.start()
    yield pull
    await pull.unsubscribe()


async def test_a_standing_pull_brings_a_message_at_once_and_everything_in_order(
    pull: StandingPull, js: JetStreamContext
) -> None:
    waiting = asyncio.create_task(pull.fetch(8, 0.002))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await js.publish(SUBJECT, body(1))
    assert [sequence_of(message) for message in await waiting] == [1]
    assert time.monotonic() - began < 0.1
    for number in range(2, 101):
        await js.publish(SUBJECT, body(number))
    taken: list[int] = []
    while len(taken) < 99:
        some = await pull.fetch(8, 0.002)
        assert len(some) <= 8
        taken += [sequence_of(message) for message in some]
    assert taken == list(range(2, 101))


async def test_a_standing_pull_waits_no_longer_than_asked_for_more(pull: StandingPull) -> None:
    began = time.monotonic()
    with pytest.raises(NothingYetError):
        await pull.fetch(7, 0.01)
    assert time.monotonic() - began < 0.5


async def test_a_task_that_swallows_its_cancellation_is_ended_all_the_same() -> None:
    cancelled = 0

    async def stubborn() -> str:
        nonlocal cancelled
        while cancelled < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
        return "ended"

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    assert await asyncio.wait_for(end_tasks([task]), 5) == ["ended"]


def from_stranger(number: int, name: str = "stranger", generation: int = 1) -> bytes:
    batch = decode_event_batch(body(number))
    return encode(msgspec.structs.replace(batch, instance_id=name, generation=generation))


async def test_t16_queued_events_of_an_instance_that_nobody_registered_are_discarded(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext
) -> None:
    await js.publish(events_subject("engine", "m", "stranger", 0), from_stranger(4))
    await js.publish(SUBJECT, body(5))
    async with matcher(nats_server.port, redis_server):
        await until_indexed(js, 5)
    assert await indexed(js) == [5]


async def test_events_that_overtake_the_news_of_their_registration_are_not_lost(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = asyncio.Event()
    watch_once = KvWatch._publish

    def publish(self: KvWatch[object]) -> None:
        if late.is_set():
            asyncio.get_running_loop().call_later(0.3, watch_once, self)
        else:
            watch_once(self)

    monkeypatch.setattr(KvWatch, "_publish", publish)
    async with matcher(nats_server.port, redis_server):
        late.set()
        await RegistryStore(js).put(EngineRecord(instance_id="new", model="m", block_size=4, generation=7))
        await js.publish(events_subject("engine", "m", "new", 0), from_stranger(8, "new", 7))
        await until_indexed(js, 8)


async def test_a_message_that_makes_processing_fail_is_put_aside_with_its_reason_and_the_others_go_on(
    nats_server: ServerProcess, redis_server: ServerProcess, js: JetStreamContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = worker.plan

    def failing(batch: EventBatch) -> object:
        if batch.last_seq == 11:
            raise RuntimeError("a bug that this message meets")
        return plan(batch)

    monkeypatch.setattr(worker, "plan", failing)
    for number in (10, 11, 12):
        await js.publish(SUBJECT, body(number))
    async with matcher(nats_server.port, redis_server):
        await until_indexed(js, 12)
        assert await indexed(js) == [10, 12]
        dead = await js.get_last_msg(DEAD_STREAM, "kv.dead.matcher")
        assert dead.data == body(11) or decode_event_batch(dead.data or b"").last_seq == 11
        assert dead.headers is not None
        assert dead.headers[REASON_HEADER] == "a bug that this message meets"
        assert (dead.headers[SUBJECT_HEADER], dead.headers[SEQUENCE_HEADER]) == (SUBJECT, "2")
