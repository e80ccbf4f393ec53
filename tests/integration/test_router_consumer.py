"""The router's consumer against a real NATS: catching up, servers that die, streams that are lost, poison."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from schemas.blocks import Tier, content_hashes, pack_hashes, prefix_keys, token_bytes
from schemas.events import WIRE_VERSION, IndexBatch, IndexEvent, IndexGroup, IndexRemoved, IndexStored, Worker, encode
from schemas.registry import EngineRecord
from schemas.subjects import DEAD_STREAM, INDEX_STREAM, index_subject
from services.router.consumer import IndexConsumer
from services.router.index.plain import PlainIndex
from services.router.space import SLICE_BLOCKS
from services.router.spaces import Spaces
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.health import Health
from services.runtime.registry_store import Registry
from services.runtime.settings import NatsSettings
from tests.conftest import ServerProcess, make_nats_server

MODEL, TENANT, BLOCK = "m", "default", 4
WORKER = Worker("i", 0)
SUBJECT = index_subject(MODEL, TENANT)
REGISTRY = Registry({("i", 0): EngineRecord(instance_id="i", model=MODEL, block_size=BLOCK, generation=1)})


def tokens_of(number: int, blocks: int = 1) -> list[int]:
    return [number * 1000 + offset for offset in range(blocks * BLOCK)]


def stored(number: int, blocks: int = 1) -> IndexStored:
    names = pack_hashes(range(number * 1_000_000 + 1, number * 1_000_000 + 1 + blocks))
    return IndexStored(
        WORKER, Tier.NPU, names, None, content_hashes(token_bytes(tokens_of(number, blocks)), BLOCK).tobytes()
    )


def body(sequence: int, *events: IndexEvent) -> bytes:
    group = IndexGroup(sequence, "engine", "i", 0, 1, sequence, sequence, time.time(), list(events))
    return encode(IndexBatch(WIRE_VERSION, MODEL, TENANT, [group], 1))


async def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


class Replica:
    """One router's consumer with its own connection."""

    def __init__(self, client: Client, settings: NatsSettings, catch_up_timeout: float = 60.0) -> None:
        self.client = client
        self.js = client.jetstream()
        self.settings = settings
        self.health = Health("router")
        self.spaces = Spaces(PlainIndex)
        self.spaces.set_registry(REGISTRY)
        self.restored = 0
        self.consumer = IndexConsumer(client, self.js, self.spaces, self.health, catch_up_timeout, self.restore)

    async def restore(self) -> None:
        self.restored += 1
        await ensure_streams(self.js, self.settings)

    async def publish(self, sequence: int, *events: IndexEvent) -> int:
        return (await self.js.publish(SUBJECT, body(sequence, *events))).seq

    def matched(self, number: int, blocks: int = 1) -> int:
        space = self.spaces.find(MODEL, TENANT)
        assert space is not None
        keys = prefix_keys(content_hashes(token_bytes(tokens_of(number, blocks)), BLOCK)).tobytes()
        return space.index.match(keys, space.candidates, space.pool_holders)[0].npu

    def reason(self) -> str:
        return str(self.health.report()["conditions"]["index"]["reason"])  # type: ignore[index]


@contextlib.asynccontextmanager
async def replica_of(settings: NatsSettings) -> AsyncIterator[Replica]:
    client = await connect_nats(settings, "router-test")
    await ensure_streams(client.jetstream(), settings)
    replica = Replica(client, settings)
    try:
        yield replica
    finally:
        await replica.consumer.stop()
        await client.close()


@pytest.fixture
async def replica(nats_client: Client, nats_server: ServerProcess) -> AsyncIterator[Replica]:
    async with replica_of(NatsSettings(url=nats_server.url)) as replica:
        yield replica


@pytest.fixture
def own_server(tmp_path: Path) -> ServerProcess:
    server = make_nats_server(tmp_path)
    server.start()
    return server


async def test_what_the_stream_holds_at_the_start_is_read_before_the_router_is_ready(replica: Replica) -> None:
    for number in range(1, 51):
        await replica.publish(number, stored(number))
    assert not replica.health.report()["conditions"]
    replica.consumer.start()
    assert "not begun" in replica.reason()
    await until(lambda: replica.health.ready, "ready")
    assert replica.consumer.position == 50
    assert [replica.matched(number) for number in range(1, 51)] == [1] * 50


async def test_an_empty_stream_is_caught_up_with_at_once_and_followed(replica: Replica) -> None:
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    sequence = await replica.publish(1, stored(1))
    assert await replica.consumer.wait_for(sequence, 10.0)
    assert replica.matched(1) == 1
    assert not await replica.consumer.wait_for(sequence + 1, 0.05)


async def test_t40_catching_up_has_a_reason_with_numbers_and_a_deadline(replica: Replica) -> None:
    replica.consumer = IndexConsumer(replica.client, replica.js, replica.spaces, replica.health, 0.0, replica.restore)
    seen: list[str] = []
    apply = replica.spaces.apply
    replica.spaces.apply = lambda batch: (seen.append(replica.reason()), apply(batch))[1]  # type: ignore[method-assign]
    for number in range(1, 4):
        await replica.publish(number, stored(number))
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    assert [reason.split(" after")[0] for reason in seen] == [
        f"catching up: {number} of 3 messages" for number in range(3)
    ]
    assert all("deadline of 0 s (router.catch_up_timeout)" in reason for reason in seen)


async def test_t10_poison_is_put_aside_and_the_rest_is_applied(replica: Replica) -> None:
    broken = IndexStored(WORKER, Tier.NPU, b"123", None, b"")
    uneven = IndexStored(WORKER, Tier.NPU, pack_hashes([1, 2]), None, pack_hashes([1]))
    await replica.js.publish(SUBJECT, b"\xc1 this is no batch")
    await replica.js.publish(SUBJECT, b"")
    await replica.js.publish(SUBJECT, encode(IndexBatch(99, MODEL, TENANT, [])))
    await replica.publish(1, broken, stored(1), uneven, IndexRemoved(WORKER, Tier.NPU, b"7"), stored(2))
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    assert (replica.matched(1), replica.matched(2)) == (1, 1)
    assert (replica.spaces.counts.applied, replica.spaces.counts.refused) == (2, 3)
    dead = await replica.js.stream_info(DEAD_STREAM)
    assert dead.state.messages == 3


async def test_a_fault_of_the_index_costs_one_message(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    space = replica.spaces.find(MODEL, TENANT)
    assert space is not None
    faults = iter([RuntimeError("a bug")])
    apply = space.apply

    def failing_once(event: IndexEvent) -> object:
        for fault in faults:
            raise fault
        return apply(event)

    monkeypatch.setattr(space, "apply", failing_once)
    await replica.publish(1, stored(1))
    await replica.publish(2, stored(2))
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    assert (replica.matched(1), replica.matched(2)) == (0, 1)


async def test_messages_missing_in_the_middle_are_looked_for_twice_and_then_passed(replica: Replica) -> None:
    for number in range(1, 6):
        await replica.publish(number, stored(number))
    await replica.js.delete_msg(INDEX_STREAM, 3)
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    assert [replica.matched(number) for number in range(1, 6)] == [1, 1, 0, 1, 1]
    assert replica.consumer.position == 5


async def test_t11_messages_that_were_dropped_unread_mean_starting_over(replica: Replica) -> None:
    for number in range(1, 4):
        await replica.publish(number, stored(number))
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    await replica.consumer.stop()
    await replica.publish(4, IndexRemoved(WORKER, Tier.NPU, stored(1).engine_hashes))
    await replica.publish(5, stored(5))
    await replica.js.purge_stream(INDEX_STREAM, seq=5)
    replica.consumer.start()
    await until(lambda: replica.consumer.position == 5 and replica.health.ready, "caught up again")
    assert [replica.matched(number) for number in (1, 2, 5)] == [0, 0, 1]


async def test_na_10_a_stream_deleted_by_hand_is_made_again_and_everything_starts_over(replica: Replica) -> None:
    await replica.publish(1, stored(1))
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    await replica.js.delete_stream(INDEX_STREAM)
    await until(lambda: not replica.health.ready, "not ready without the stream")
    await until(lambda: replica.health.ready, "ready with the new stream")
    assert replica.restored == 1
    assert replica.matched(1) == 0
    sequence = await replica.publish(2, stored(2))
    assert await replica.consumer.wait_for(sequence, 10.0)
    assert replica.matched(2) == 1


async def test_na_10_a_stream_made_anew_by_somebody_else_is_read_from_its_beginning(replica: Replica) -> None:
    for number in range(1, 4):
        await replica.publish(number, stored(number))
    replica.consumer.start()
    await until(lambda: replica.health.ready, "ready")
    config = (await replica.js.stream_info(INDEX_STREAM)).config
    await replica.js.delete_stream(INDEX_STREAM)
    await replica.js.add_stream(config)
    for number in range(11, 15):
        await replica.publish(number, stored(number))
    await until(lambda: replica.matched(14) == 1, "the new stream's blocks")
    assert [replica.matched(number) for number in (1, 11)] == [0, 1]
    assert replica.spaces.counts.repeated_group == 0


@pytest.mark.parametrize("storage", ["file", "memory"])
async def test_na_01_messages_after_a_servers_death_are_applied(own_server: ServerProcess, storage: str) -> None:
    async with replica_of(NatsSettings(url=own_server.url, storage=storage)) as replica:  # type: ignore[arg-type]
        for number in range(1, 4):
            await replica.publish(number, stored(number))
        replica.consumer.start()
        await until(lambda: replica.health.ready, "ready")
        await asyncio.to_thread(own_server.kill)
        await until(lambda: not replica.health.ready, "not ready without a server")
        assert replica.matched(1) == 1
        await asyncio.to_thread(own_server.start)
        await until(lambda: replica.health.ready, "ready again")
        last = 0
        for number in range(4, 14):
            last = await published(partial(replica.publish, number, stored(number)))
        assert await replica.consumer.wait_for(last, 15.0)
        assert [replica.matched(number) for number in range(4, 14)] == [1] * 10
        kept = storage == "file"
        assert [replica.matched(number) for number in range(1, 4)] == [int(kept)] * 3
    own_server.stop()


async def published(publish: partial[object]) -> int:
    """Repeat until the server that has just come back takes the message."""
    while True:
        try:
            return await publish()  # type: ignore[misc, no-any-return]
        except (NatsError, TimeoutError):
            await asyncio.sleep(0.05)


async def test_a_burst_of_large_events_lets_others_in_every_few_milliseconds(replica: Replica) -> None:
    blocks = 40 * SLICE_BLOCKS
    await replica.publish(1, stored(1, blocks // 2))
    last = await replica.publish(2, stored(2, blocks // 2), IndexRemoved(WORKER, Tier.NPU, stored(1).engine_hashes))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    waiting = asyncio.create_task(others())
    replica.consumer.start()
    await until(lambda: replica.spaces.counts.blocks.attached > 0, "the first slice")
    before, turns_before = replica.spaces.counts.blocks.attached, turns
    assert before < blocks
    assert await replica.consumer.wait_for(last, 30.0)
    waiting.cancel()
    # In turns, not in time: the machine is shared.
    assert turns - turns_before >= (blocks - before) / SLICE_BLOCKS / 8
    assert replica.matched(2, blocks // 2) == blocks // 2


async def test_what_a_retired_worker_had_is_swept_away_without_further_messages(replica: Replica) -> None:
    last = await replica.publish(1, stored(1, 3 * SLICE_BLOCKS))
    replica.consumer.start()
    assert await replica.consumer.wait_for(last, 15.0)
    replica.spaces.set_registry(Registry())
    space = replica.spaces.find(MODEL, TENANT)
    assert space is not None
    assert space.index.stats().blocks == 3 * SLICE_BLOCKS
    await until(lambda: space.index.stats().blocks == 0, "an empty index")
    assert space.index.audit() == []


async def test_two_replicas_say_the_same(replica: Replica, nats_server: ServerProcess) -> None:
    async with replica_of(NatsSettings(url=nats_server.url)) as other:
        replica.consumer.start()
        last = 0
        for number in range(1, 20):
            last = await replica.publish(number, stored(number))
        other.consumer.start()
        for one in (replica, other):
            assert await one.consumer.wait_for(last, 10.0)
        assert [replica.matched(n) for n in range(1, 20)] == [other.matched(n) for n in range(1, 20)] == [1] * 19
