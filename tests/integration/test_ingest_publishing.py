"""Batches on their way into a real JetStream: ordered per publisher, stored once, nothing lost in silence."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nats.aio.client import Client

from schemas.blocks import Tier, pack_hashes
from schemas.events import EventBatch, Removed, decode_event_batch
from schemas.registry import EngineRecord
from schemas.subjects import EVENTS_ALL, EVENTS_STREAM
from services.ingest.batching import BatchBuffer
from services.ingest.lane import Lane, last_stored
from services.ingest.pending import Message, PendingBatch
from services.ingest.publishing import BatchPublisher
from services.ingest.registrations import Publisher, publishers_of
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.settings import NatsSettings
from tests.conftest import ServerProcess, make_nats_server


def publisher(instance_id: str = "a", dp_rank: int = 0) -> Publisher:
    record = EngineRecord(
        instance_id=instance_id,
        model="m",
        block_size=4,
        dp_rank=dp_rank,
        generation=1,
        endpoints={Tier.NPU: "tcp://127.0.0.1:1"},
    )
    return publishers_of(record)[0]


@dataclass
class Source:
    """A lane with what its publisher would send."""

    lane: Lane
    batches: BatchPublisher
    stored: list[PendingBatch] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def say(self, *numbers: int, hashes: int = 1) -> None:
        for seq in numbers:
            event = Removed(Tier.NPU, pack_hashes([seq] * hashes))
            self.lane.buffer.append(Message(seq, 1, 0.0, 0.0, [event], accepted=1, blocks=hashes))
            self.batches.offer(self.lane)

    def is_empty(self) -> bool:
        return len(self.lane.buffer) == 0


def source(batches: BatchPublisher, of: Publisher | None = None, max_batch_bytes: int = 64_000) -> Source:
    stored: list[PendingBatch] = []
    refused: list[str] = []
    lane = batches.add(
        of or publisher(),
        BatchBuffer(1000, max_batch_bytes),
        stored.append,
        lambda batch, reason: refused.append(reason),
    )
    return Source(lane, batches, stored, refused)


async def until(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.01)


async def kept(nc: Client) -> list[EventBatch]:
    """Everything the stream keeps, in its order."""
    js = nc.jetstream()
    expected = (await js.stream_info(EVENTS_STREAM)).state.messages
    subscription = await js.subscribe(EVENTS_ALL, ordered_consumer=True)
    batches = [decode_event_batch((await subscription.next_msg(timeout=5)).data) for _ in range(expected)]
    await subscription.unsubscribe()
    return batches


def numbers(batches: list[EventBatch], instance_id: str = "a") -> list[int]:
    return [
        seq
        for batch in batches
        if batch.instance_id == instance_id
        for seq in range(batch.first_seq, batch.last_seq + 1)
    ]


@pytest.fixture
async def broker(nats_server: ServerProcess, nats_client: Client) -> AsyncIterator[BatchPublisher]:
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings(url=nats_server.url))
    batches = BatchPublisher(nats_client, js, linger=0.002, acknowledge_timeout=1.0)
    await batches.start()
    yield batches
    await batches.stop(0.0)


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    server = make_nats_server(tmp_path)
    server.start()
    yield server
    server.kill()


async def connected(server: ServerProcess) -> tuple[Client, BatchPublisher]:
    settings = NatsSettings(url=server.url)
    nc = await connect_nats(settings, "test", None)
    await ensure_streams(nc.jetstream(), settings)
    batches = BatchPublisher(nc, nc.jetstream(), linger=0.002, acknowledge_timeout=0.5)
    await batches.start()
    return nc, batches


async def test_messages_of_a_few_milliseconds_become_one_stored_batch(
    broker: BatchPublisher, nats_client: Client
) -> None:
    talk = source(broker)
    talk.say(*range(5))
    await until(talk.is_empty, "acknowledgement")
    batches = await kept(nats_client)
    assert [(batch.first_seq, batch.last_seq, len(batch.events)) for batch in batches] == [(0, 4, 5)]
    assert [(batch.messages, batch.accepted, batch.blocks) for batch in talk.stored] == [(5, 5, 5)]


async def test_order_is_kept_per_publisher_while_many_send_at_once(broker: BatchPublisher, nats_client: Client) -> None:
    sources = [source(broker, publisher(f"engine-{index}")) for index in range(8)]
    for seq in range(200):
        for talk in sources:
            talk.say(seq)
        if seq % 10 == 0:
            await asyncio.sleep(0.001)
    await until(lambda: all(talk.is_empty() for talk in sources), "acknowledgement of all")
    batches = await kept(nats_client)
    for index in range(8):
        assert numbers(batches, f"engine-{index}") == list(range(200))


async def test_the_same_batch_published_again_is_stored_once(broker: BatchPublisher, nats_client: Client) -> None:
    first, again = source(broker), source(broker)
    first.say(0)
    again.say(0)
    await until(lambda: first.is_empty() and again.is_empty(), "acknowledgement of both")
    assert numbers(await kept(nats_client)) == [0]


async def test_another_generation_rank_or_part_is_another_message(broker: BatchPublisher) -> None:
    lane = source(broker).lane
    other_rank = source(broker, publisher(dp_rank=1)).lane
    batch = PendingBatch(1, 0, 0, 0.0, 0.0)
    ids = {
        lane.message_id(batch),
        other_rank.message_id(batch),
        lane.message_id(PendingBatch(2, 0, 0, 0.0, 0.0)),
        lane.message_id(PendingBatch(1, 0, 1, 0.0, 0.0)),
        lane.message_id(PendingBatch(1, 0, 0, 0.0, 0.0, part=1)),
    }
    assert len(ids) == 5


async def test_a_message_above_the_body_limit_is_stored_in_parts(broker: BatchPublisher, nats_client: Client) -> None:
    talk = source(broker, max_batch_bytes=4096)
    talk.say(0, hashes=2000)
    talk.say(1)
    await until(talk.is_empty, "acknowledgement")
    batches = await kept(nats_client)
    assert len(batches) > 3
    assert sum(
        len(event.engine_hashes) for batch in batches for event in batch.events if isinstance(event, Removed)
    ) == (2001 * 8)
    assert sum(batch.messages for batch in talk.stored) == 2


async def test_a_body_that_nats_can_never_take_is_given_up_and_named(
    broker: BatchPublisher, nats_client: Client
) -> None:
    talk = source(broker, max_batch_bytes=8 * 1024 * 1024)
    talk.say(0, hashes=200_000)
    talk.say(2)
    await until(talk.is_empty, "end of the queue")
    assert talk.refused == ["too_large_for_nats"]
    assert numbers(await kept(nats_client)) == [2]


async def test_a_server_that_is_killed_loses_no_batch_and_no_order(own_server: ServerProcess) -> None:
    nc, batches = await connected(own_server)
    sources = [source(batches, publisher(f"engine-{index}")) for index in range(3)]
    for seq in range(300):
        for talk in sources:
            talk.say(seq)
        await asyncio.sleep(0.001)
        if seq == 100:
            own_server.kill()
        if seq == 200:
            own_server.start()
    await until(lambda: all(talk.is_empty() for talk in sources), "acknowledgement of all", 30)
    everything = await kept(nc)
    for index in range(3):
        assert numbers(everything, f"engine-{index}") == list(range(300))
    assert batches.trouble == ""
    await batches.stop(1.0)
    await nc.close()


async def test_na_03_a_frozen_server_is_named_and_resumes_without_loss(own_server: ServerProcess) -> None:
    nc, batches = await connected(own_server)
    talk = source(batches)
    talk.say(0)
    await until(talk.is_empty, "first acknowledgement")
    assert own_server.process is not None
    os.kill(own_server.process.pid, signal.SIGSTOP)
    for seq in range(1, 200):
        talk.say(seq, hashes=500)
        await asyncio.sleep(0.005)
    await until(lambda: "not acknowledged" in batches.trouble, "complaint")
    assert not talk.is_empty()
    os.kill(own_server.process.pid, signal.SIGCONT)
    await until(talk.is_empty, "acknowledgement", 30)
    assert numbers(await kept(nc)) == list(range(200))
    await batches.stop(1.0)
    await nc.close()


async def test_a_stop_while_the_server_is_frozen_ends_in_time(own_server: ServerProcess) -> None:
    nc, batches = await connected(own_server)
    talk = source(batches)
    assert own_server.process is not None
    os.kill(own_server.process.pid, signal.SIGSTOP)
    talk.say(0)
    began = time.monotonic()
    await batches.stop(1.0)
    assert time.monotonic() - began < 3.0
    assert not talk.is_empty(), "what could not be sent stays with its owner, to be counted"
    os.kill(own_server.process.pid, signal.SIGCONT)
    await nc.close()


async def test_na_10_a_deleted_stream_is_reported_and_used_again_once_it_is_back(own_server: ServerProcess) -> None:
    nc, batches = await connected(own_server)
    js = nc.jetstream()
    await js.delete_stream(EVENTS_STREAM)
    talk = source(batches)
    talk.say(0, 1)
    await until(batches.no_stream.is_set, "notice")
    assert EVENTS_STREAM in batches.trouble
    await ensure_streams(js, NatsSettings(url=own_server.url))
    await until(talk.is_empty, "acknowledgement")
    assert numbers(await kept(nc)) == [0, 1]
    await batches.stop(1.0)
    await nc.close()


async def test_a_batch_stored_before_a_long_outage_is_not_stored_again(
    nats_server: ServerProcess, nats_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the duplicate window the stream is asked, not trusted."""
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings(url=nats_server.url, duplicate_window=0.2))
    batches = BatchPublisher(nats_client, js, linger=0.0, acknowledge_timeout=0.5)
    monkeypatch.setattr("services.ingest.publishing.TRUST_DUPLICATE_WINDOW_SECONDS", 0.3)
    talk = source(batches)
    lost = nats_client.new_inbox()
    await batches.start()
    inbox, batches._inbox = batches._inbox, lost
    talk.say(0)
    await until(lambda: talk.lane.sent is not None, "publish")
    await asyncio.sleep(0.4)  # the duplicate window passes while the acknowledgement is lost
    batches._inbox = inbox
    await until(talk.is_empty, "acknowledgement")
    assert numbers(await kept(nats_client)) == [0]
    await batches.stop(0.0)


async def test_the_newest_batch_of_a_subject_can_be_asked_for(broker: BatchPublisher, nats_client: Client) -> None:
    talk = source(broker)
    js = nats_client.jetstream()
    assert await last_stored(js, talk.lane.subject) is None
    talk.say(4, 5)
    await until(talk.is_empty, "acknowledgement")
    newest = await last_stored(js, talk.lane.subject)
    assert newest is not None
    assert (newest.generation, newest.last_seq) == (1, 5)


async def test_stopping_sends_what_is_left(broker: BatchPublisher, nats_client: Client) -> None:
    talk = source(broker)
    talk.say(*range(50))
    await broker.stop(5.0)
    assert talk.is_empty()
    assert numbers(await kept(nats_client)) == list(range(50))


async def test_a_removed_lane_sends_no_more(broker: BatchPublisher, nats_client: Client) -> None:
    gone, stays = source(broker, publisher("gone")), source(broker, publisher("stays"))
    gone.say(0)
    broker.remove(gone.lane)
    gone.lane.buffer.drop_all()
    stays.say(0)
    await until(stays.is_empty, "acknowledgement")
    assert {batch.instance_id for batch in await kept(nats_client)} == {"stays"}
