"""The states of publishers' streams in the bucket that router and coordinator read."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import zmq.asyncio
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError

from schemas.blocks import Tier
from schemas.events import BodyError
from schemas.registry import EngineRecord
from schemas.streams import StreamRecord, StreamState, dump_stream_record, load_stream_record
from schemas.subjects import CURSORS_BUCKET, EVENTS_STREAM, STREAMS_BUCKET, stream_key
from services.ingest.app import ingest
from services.ingest.cursors import load_cursor
from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.registry_store import RegistryStore
from services.runtime.settings import NatsSettings
from tests.conftest import ServerProcess
from tests.e2e.support import EngineStub

RECORD = StreamRecord(
    source="engine",
    instance_id="a",
    dp_rank=0,
    model="m",
    tenant="default",
    state=StreamState.LIVE,
    generation=7,
    state_since=1.0,
    written_at=2.0,
    writer="w",
    coverage=1.0,
)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.02)


def test_a_record_survives_its_json_form_and_a_newer_field_does_no_harm() -> None:
    assert load_stream_record(dump_stream_record(RECORD)) == RECORD
    assert load_stream_record(dump_stream_record(RECORD)[:-1] + b',"later":1}') == RECORD


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"source":"engine"}', dump_stream_record(RECORD).replace(b"live", b"ill")]
)
def test_a_record_that_cannot_be_read_is_an_error_that_says_so(body: bytes) -> None:
    with pytest.raises(BodyError, match="stream record"):
        load_stream_record(body)


def test_an_old_message_makes_a_stream_idle_not_stale() -> None:
    assert RECORD.age(10.0) is None
    idle = load_stream_record(dump_stream_record(RECORD).replace(b'"writer"', b'"last_message_at":4.0,"writer"'))
    assert (idle.age(7204.0), idle.state) == (7200.0, StreamState.LIVE)


async def test_the_bucket_follows_a_publisher_and_forgets_it_when_nobody_listens(
    nats_server: ServerProcess, nats_client: Client, context: zmq.asyncio.Context
) -> None:
    engine = EngineStub(context)
    js = nats_client.jetstream()
    settings = NatsSettings(url=nats_server.url, stream_state_ttl=1.0)
    config = Config(nats=settings).model_copy(update={"ingest": Config().ingest.model_copy(update={"port": 0})})

    async def record() -> StreamRecord | None:
        try:
            entry = await (await js.key_value(STREAMS_BUCKET)).get(stream_key("engine", "a", 0))
        except KeyNotFoundError:
            return None
        return load_stream_record(entry.value or b"")

    async def state_is(state: StreamState | None) -> bool:
        found = await record()
        return (found.state if found else None) is state

    async with ingest(config, Health("ingest")):
        await RegistryStore(js).put(
            EngineRecord(
                instance_id="a",
                model="m",
                block_size=4,
                generation=5,
                endpoints={Tier.NPU: engine.publisher.endpoint},
            )
        )
        await engine.publisher.subscribed()
        engine.publish()
        await until(lambda: state_is(StreamState.LIVE), "live")
        first = await record()
        assert first is not None
        assert (first.generation, first.last_seq, first.coverage, first.connected) == (5, 0, 1.0, True)

        async def repeated() -> bool:
            again = await record()
            return again is not None and again.written_at > first.written_at

        await until(repeated, "repetition")
        await engine.publisher.close()
        await until(lambda: state_is(StreamState.STALE), "stale")
    await until(lambda: state_is(None), "forgotten")


async def test_of_two_ingests_the_one_that_knows_less_keeps_silent(
    nats_server: ServerProcess, nats_client: Client, context: zmq.asyncio.Context
) -> None:
    engine = EngineStub(context)
    js = nats_client.jetstream()
    settings = NatsSettings(url=nats_server.url, stream_state_ttl=1.5)
    config = Config(nats=settings).model_copy(update={"ingest": Config().ingest.model_copy(update={"port": 0})})

    async def record() -> StreamRecord | None:
        with contextlib.suppress(KeyNotFoundError):
            entry = await (await js.key_value(STREAMS_BUCKET)).get(stream_key("engine", "a", 0))
            return load_stream_record(entry.value or b"")
        return None

    async with ingest(config, Health("ingest")):
        endpoints = {Tier.NPU: engine.publisher.endpoint}
        await RegistryStore(js).put(
            EngineRecord(instance_id="a", model="m", block_size=4, generation=5, endpoints=endpoints)
        )
        await engine.publisher.subscribed()
        engine.publish()

        async def is_live() -> bool:
            found = await record()
            return found is not None and found.state is StreamState.LIVE

        await until(is_live, "live")
        words = set()
        # The second one has heard nothing yet: to it the stream is unknown.
        async with ingest(config, Health("ingest")) as second:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                found = await record()
                words.add(found.state if found is not None else None)
                await asyncio.sleep(0.05)
            (subscription,) = second
            assert subscription.intake.stream.state is StreamState.UNKNOWN
        assert words == {StreamState.LIVE}
    await engine.publisher.close()


async def test_a_generation_outlives_the_stream_that_told_of_it(
    nats_server: ServerProcess, nats_client: Client, context: zmq.asyncio.Context
) -> None:
    engine = EngineStub(context)
    js = nats_client.jetstream()
    config = Config(nats=NatsSettings(url=nats_server.url)).model_copy(
        update={"ingest": Config().ingest.model_copy(update={"port": 0})}
    )

    async def began() -> bool:
        with contextlib.suppress(KeyNotFoundError):
            cursor = load_cursor(
                (await (await js.key_value(CURSORS_BUCKET)).get(stream_key("engine", "a", 0))).value or b""
            )
            return cursor is not None and cursor.generation > 5
        return False

    async with ingest(config, Health("ingest")):
        endpoints = {Tier.NPU: engine.publisher.endpoint}
        await RegistryStore(js).put(
            EngineRecord(instance_id="a", model="m", block_size=4, generation=5, endpoints=endpoints)
        )
        await engine.publisher.subscribed()
        engine.publish()
        engine.publish()
        engine.publisher.restart()
        engine.publish()
        await until(began, "a cursor of the new generation")
    await js.purge_stream(EVENTS_STREAM)
    async with ingest(config, Health("ingest")) as again:

        async def resumed() -> bool:
            return all(subscription.ready for subscription in again) and len(again) == 1

        await until(resumed, "position")
        (subscription,) = again
        assert subscription.intake.stream.generation > 5
        assert subscription.intake.stream.last_seq == 0
    await engine.publisher.close()
