"""Warm start against a real NATS: a stopped or new router goes on behind the last snapshot, or says why not."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.blocks import Tier, content_hashes, pack_hashes, prefix_keys, token_bytes
from schemas.events import WIRE_VERSION, IndexBatch, IndexGroup, IndexStored, Worker, encode
from schemas.registry import EngineRecord
from schemas.subjects import INDEX_STREAM, RESYNC_ALL, SNAPSHOT_BUCKET, index_subject, resync_subject
from services.router import metrics, snapshot_form
from services.router.consumer import IndexConsumer
from services.router.healing import Healing
from services.router.index import create_index
from services.router.snapshot_store import SnapshotStore
from services.router.snapshots import Snapshots
from services.router.spaces import Spaces
from services.router.standing import Following, Heard
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.health import Health
from services.runtime.registry_store import Registry
from services.runtime.settings import NatsSettings
from tests.conftest import ServerProcess

MODEL, BLOCK = "m", 4
make_index = partial(create_index, "auto", 100_000, 1_000)
SUBJECT = index_subject(MODEL, "default")
REGISTRY = Registry({("i", 0): EngineRecord(instance_id="i", model=MODEL, block_size=BLOCK, generation=1)})


async def until(condition: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def tokens_of(number: int) -> list[int]:
    return [number * 1000 + offset for offset in range(BLOCK)]


class Replica:
    """A router without its HTTP side."""

    def __init__(self, client: Client, interval: float = 600.0) -> None:
        self.client = client
        self.js = client.jetstream()
        self.health = Health("router")
        self.spaces = Spaces(make_index)
        self.spaces.set_registry(REGISTRY)
        self.consumer = IndexConsumer(client, self.js, self.spaces, self.health, 60.0, self._make_streams)
        self.snapshots = Snapshots(self.js, self.spaces, self.consumer, make_index, interval, 10.0, 10.0)

    async def _make_streams(self) -> None:
        await ensure_streams(self.js, NatsSettings())

    async def start(self) -> bool:
        """Whether a snapshot was used; ready afterwards."""
        restored = await self.snapshots.restore()
        self.snapshots.start()
        self.consumer.start()
        await until(lambda: self.health.ready, "ready")
        return restored

    async def stop(self) -> None:
        await self.consumer.stop()
        await self.snapshots.stop()

    async def publish(self, number: int) -> int:
        contents = content_hashes(token_bytes(tokens_of(number)), BLOCK).tobytes()
        event = IndexStored(Worker("i", 0), Tier.NPU, pack_hashes([number]), None, contents)
        group = IndexGroup(number, "engine", "i", 0, 1, number, number, time.time(), [event])
        return (await self.js.publish(SUBJECT, encode(IndexBatch(WIRE_VERSION, MODEL, "default", [group], 1)))).seq

    def matched(self, number: int) -> int:
        space = self.spaces.find(MODEL, "default")
        assert space is not None
        keys = prefix_keys(content_hashes(token_bytes(tokens_of(number)), BLOCK)).tobytes()
        return space.index.match(keys, space.candidates, space.pool_holders)[0].npu


@contextlib.asynccontextmanager
async def replica_of(url: str, interval: float = 600.0) -> AsyncIterator[Replica]:
    client = await connect_nats(NatsSettings(url=url), "router-test")
    await ensure_streams(client.jetstream(), NatsSettings())
    replica = Replica(client, interval)
    try:
        yield replica
    finally:
        await replica.stop()
        await client.close()


def outcomes(name: str) -> float:
    return float(metrics.SNAPSHOTS.labels(name)._value.get())


@pytest.fixture
def url(nats_client: Client, nats_server: ServerProcess) -> str:
    return nats_server.url


async def test_po_10_a_stopped_router_starts_from_its_last_snapshot_and_reads_only_what_came_since(url: str) -> None:
    async with replica_of(url) as first:
        await first.start()
        for number in range(1, 21):
            last = await first.publish(number)
        assert await first.consumer.wait_for(last, 10)
    async with replica_of(url) as second:
        for number in range(21, 26):
            await second.publish(number)
        assert await second.start()
        assert second.consumer.position == 25
        assert second.spaces.counts.applied == 5
        assert [second.matched(number) for number in range(1, 26)] == [1] * 25


async def test_a_snapshot_is_written_while_the_router_runs_and_only_when_something_is_new(url: str) -> None:
    before = outcomes("written")
    async with replica_of(url, interval=0.05) as replica:
        await replica.start()
        last = await replica.publish(1)
        await until(lambda: outcomes("written") == before + 1, "a snapshot")
        assert await replica.consumer.wait_for(last, 5)
        (slot,) = await SnapshotStore(replica.js).slots()
        assert slot.position <= 1
        for number in range(2, 5):
            last = await replica.publish(number)
        await until(lambda: replica.snapshots._last[1] == last, "a snapshot of the rest")
        written = outcomes("written")
        await asyncio.sleep(0.3)
        assert outcomes("written") == written


async def test_of_several_replicas_one_writes_and_another_goes_on_when_it_leaves(url: str) -> None:
    async with replica_of(url, interval=0.05) as second:
        async with replica_of(url, interval=0.05) as first:
            await first.start()
            await first.publish(1)
            await until(lambda: first.snapshots._last[1] == 1, "a snapshot of the first")
            await second.start()
            last = await first.publish(2)
            assert await second.consumer.wait_for(last, 5)
            await until(lambda: first.snapshots._last[1] == 2, "a second snapshot of the first")
            assert second.snapshots._last[1] == 1, "restored from it, not written"
        await second.publish(3)
        await until(lambda: second.snapshots._last[1] == 3, "a snapshot of the second")


async def test_old_snapshots_and_pieces_of_unfinished_ones_are_removed(url: str) -> None:
    async with replica_of(url) as replica:
        await replica.start()
        await replica.js.publish(f"$O.{SNAPSHOT_BUCKET}.C.UNFINISHED", b"piece")
        for number in range(1, 6):
            assert await replica.consumer.wait_for(await replica.publish(number), 5)
            await replica.snapshots.write()
        slots = await SnapshotStore(replica.js).slots()
        assert [slot.position for slot in slots] == [5, 4]
        info = await replica.js.stream_info(f"OBJ_{SNAPSHOT_BUCKET}", subjects_filter=f"$O.{SNAPSHOT_BUCKET}.C.>")
        assert {subject.rpartition(".")[2] for subject in info.state.subjects or {}} == {slot.chunks for slot in slots}


async def test_a_snapshot_larger_than_one_piece_comes_back_whole(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.snapshot_store.CHUNK_BYTES", 64)
    async with replica_of(url) as first:
        await first.start()
        for number in range(1, 51):
            last = await first.publish(number)
        assert await first.consumer.wait_for(last, 10)
    async with replica_of(url) as second:
        assert await second.start()
        assert [second.matched(number) for number in range(1, 51)] == [1] * 50


async def test_a_damaged_snapshot_is_refused_said_and_counted_and_the_one_before_serves(url: str) -> None:
    async with replica_of(url) as first:
        await first.start()
        for number in range(1, 4):
            assert await first.consumer.wait_for(await first.publish(number), 5)
            if number < 3:
                await first.snapshots.write()
        body = snapshot_form.write(snapshot_form.content_of(first.spaces, first.consumer.stream, 3, time.time()))
        await SnapshotStore(first.js).save(first.consumer.stream, 3, body[:-1] + bytes([body[-1] ^ 1]))
        first.snapshots._last = (first.consumer.stream, 3)
    before = outcomes("refused_damaged")
    async with replica_of(url) as second:
        assert await second.start()
        assert outcomes("refused_damaged") == before + 1
        assert second.spaces.counts.applied == 1, "from the snapshot at 2"
        assert [second.matched(number) for number in range(1, 4)] == [1, 1, 1]


async def test_snapshots_that_cannot_be_used_at_all_leave_the_stream(url: str) -> None:
    before = {reason: outcomes(f"refused_{reason}") for reason in ("version", "foreign")}
    async with replica_of(url) as first:
        await first.start()
        assert await first.consumer.wait_for(await first.publish(1), 5)
        store, stream = SnapshotStore(first.js), first.consumer.stream
        body = snapshot_form.write(snapshot_form.content_of(first.spaces, stream, 1, time.time()))
        await store.save(stream, 1, body[:4] + (99).to_bytes(4, "little") + body[8:])
        await store.save(stream + 1, 1, body)
        first.snapshots._last = (stream, 1)
    async with replica_of(url) as second:
        assert not await second.start()
        assert second.matched(1) == 1
    assert {reason: outcomes(f"refused_{reason}") - count for reason, count in before.items()} == {
        "version": 1,
        "foreign": 1,
    }


async def test_a_stream_that_was_cut_behind_the_snapshot_is_said_and_publishers_are_asked(url: str) -> None:
    async with replica_of(url) as first:
        await first.start()
        assert await first.consumer.wait_for(await first.publish(1), 5)
        await first.snapshots.write()
        for number in (2, 3, 4):
            last = await first.publish(number)
        assert await first.consumer.wait_for(last, 5)
        first.snapshots._last = (first.consumer.stream, last)
        await first.js.purge_stream(INDEX_STREAM, seq=4)
    before = outcomes("refused_cut")
    async with replica_of(url) as second:
        assert not await second.start()
        assert outcomes("refused_cut") == before + 1
        assert [second.matched(number) for number in (1, 2, 3, 4)] == [0, 0, 0, 1]
        assert "begins at 4" in second.health.notes["history"]
        assert 0 < second.spaces.incomplete_before <= time.time() * 1000
        await second.snapshots.write()
    async with replica_of(url) as third:
        assert await third.start()
        assert third.spaces.incomplete_before == second.spaces.incomplete_before, "a snapshot of it says so too"


async def test_t40_a_new_replica_is_ready_only_when_it_stands_where_the_stream_stood_when_it_joined(url: str) -> None:
    async with replica_of(url) as first:
        await first.start()
        assert await first.consumer.wait_for(await first.publish(1), 5)
    async with replica_of(url) as second:
        for number in range(2, 31):
            await second.publish(number)
        assert await second.snapshots.restore()
        assert not second.health.ready or not second.health.report()["conditions"]
        seen: list[str] = []
        apply = second.spaces.apply

        def noting(batch: IndexBatch) -> object:
            seen.append(str(second.health.report()["conditions"]["index"]["reason"]))  # type: ignore[index]
            return apply(batch)

        second.spaces.apply = noting  # type: ignore[assignment]
        second.consumer.start()
        await until(lambda: second.health.ready, "ready")
        assert second.consumer.position >= 30
        assert seen[0].startswith("catching up: 1 of 30 messages")
        assert len(seen) == 29


async def test_stopping_in_the_middle_of_a_message_finishes_it_first(url: str) -> None:
    async with replica_of(url) as replica:
        await replica.start()
        entered = asyncio.Event()
        apply = replica.consumer._apply

        async def slowly(message: object) -> None:
            entered.set()
            await asyncio.sleep(0.2)
            await apply(message)  # type: ignore[arg-type]

        replica.consumer._apply = slowly  # type: ignore[method-assign, assignment]
        await replica.publish(1)
        await entered.wait()
        await replica.consumer.stop()
        assert replica.matched(1) == 1
        assert replica.consumer.position == 1


async def test_a_snapshot_of_which_pieces_are_missing_is_refused_and_does_not_keep_the_router_waiting(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.snapshot_store.CHUNK_BYTES", 64)
    monkeypatch.setattr("services.router.snapshot_store.PIECE_SECONDS", 0.3)
    async with replica_of(url) as first:
        await first.start()
        assert await first.consumer.wait_for(await first.publish(1), 5)
        await first.snapshots.write()
        (slot,) = await SnapshotStore(first.js).slots()
        await first.js.purge_stream(f"OBJ_{SNAPSHOT_BUCKET}", subject=f"$O.{SNAPSHOT_BUCKET}.C.{slot.chunks}", keep=1)
    async with replica_of(url) as second:
        assert not await second.start()
        assert second.matched(1) == 1


def standing(replica: Replica) -> None:
    """Make the standings as the running router does."""
    replica.spaces.standings.update(
        replica.spaces.registry,
        replica.spaces.publishers,
        lambda key: Heard(None, 0.0),
        lambda instance_id, rank: None,
        Following.CURRENT,
        replica.spaces.incomplete_before,
        time.time(),
    )


async def test_t11_when_nobody_knows_the_history_the_publishers_are_asked_once_to_say_it_again(url: str) -> None:
    async with replica_of(url) as replica:
        for number in (1, 2, 3):
            await replica.publish(number)
        await replica.js.purge_stream(INDEX_STREAM, seq=3)
        asked: list[str] = []

        async def note(message: Msg) -> None:
            asked.append(message.subject)

        await replica.client.subscribe(RESYNC_ALL, cb=note)
        await replica.start()
        standing(replica)
        healing = Healing(replica.client, replica.spaces, replica.snapshots)
        await healing.ask()
        await healing.ask()
        await replica.client.flush()
        await until(lambda: asked, "the question")
        assert asked == [resync_subject("engine", "i", 0)]
        replica.spaces.publishers.get(("engine", "i", 0)).generation = int(time.time() * 1000) + 1
        standing(replica)
        assert healing.missing() == []


async def test_a_replica_without_history_takes_over_the_snapshot_of_one_that_has_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.healing.LOOK_SECONDS", 0.05)
    async with replica_of(url) as complete, replica_of(url) as late:
        await complete.start()
        for number in (1, 2, 3):
            assert await complete.consumer.wait_for(await complete.publish(number), 5)
        await complete.js.purge_stream(INDEX_STREAM, seq=3)
        assert not await late.start()
        assert [late.matched(number) for number in (1, 2, 3)] == [0, 0, 1]
        standing(late)
        healing = Healing(late.client, late.spaces, late.snapshots)
        healing.start()
        assert await complete.consumer.wait_for(await complete.publish(4), 5)
        await complete.snapshots.write()
        for number in (5, 6):
            last = await complete.publish(number)
        await until(lambda: late.spaces.incomplete_before == 0, "a complete history")
        assert await late.consumer.wait_for(last, 15)
        await until(lambda: [late.matched(number) for number in range(1, 7)] == [1] * 6, "everything")
        await healing.stop()
