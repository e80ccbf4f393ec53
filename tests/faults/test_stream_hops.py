"""Nothing is lost between publisher and stream: ingest killed, NATS away, two ingests at once, lossy sockets."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import nats
import pytest
import zmq.asyncio

from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher, Frames
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import GPU, BlockRemoved, BlockStored, EngineEvent, encode_batch
from schemas.events import EventBatch, decode_event_batch
from schemas.subjects import EVENTS_ALL, EVENTS_STREAM, resync_subject
from tests.conftest import free_port
from tests.e2e.support import PoolStub
from tests.faults.stream_support import Subject, measured

MODEL, BLOCK = "m", 4
PATIENCE = {"KVROUTE_INGEST__REPLAY_TIMEOUT": "0.5", "KVROUTE_INGEST__VERIFY_INTERVAL": "1.0"}


class Engine:
    """Publishes stores and removals of single blocks and remembers what it holds. loss: of each live message."""

    def __init__(self, name: str, context: zmq.asyncio.Context, loss: float = 0.0, padding: int = 0) -> None:
        self.name = name
        self.held: dict[int, list[int]] = {}
        self._chance = random.Random(3)
        self._loss = loss
        self._padding = padding
        self._next = 1
        self.publisher = EventPublisher(context, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", wire_filter=self._wire)

    def _wire(self, frames: Frames) -> tuple[Frames, ...]:
        return () if self._chance.random() < self._loss else (frames,)

    def act(self) -> None:
        event: EngineEvent
        if not self.held or self._chance.random() < 0.6:
            tokens = [self._chance.randrange(1 << 31) for _ in range(BLOCK)]
            self.held[self._next] = tokens
            event = _stored([self._next], tokens)
            self._next += 1
        else:
            gone = self._chance.choice(list(self.held))
            del self.held[gone]
            event = BlockRemoved(block_hashes=[gone], medium=GPU)
        # Removals of unknown blocks are harmless: they only make a message large.
        padding = [BlockRemoved(block_hashes=list(range(1 << 40, (1 << 40) + self._padding)), medium=GPU)]
        self.publisher.publish(encode_batch(time.time(), [event, *(padding if self._padding else [])], 0))

    async def load(self, seconds: float, per_second: int = 100) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.act()
            await asyncio.sleep(1 / per_second)

    def registration(self) -> dict[str, Any]:
        body = {"instance_id": self.name, "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": 0}
        return body | {
            "medium_endpoints": {"npu": self.publisher.endpoint},
            "replay_endpoint": self.publisher.replay_endpoint,
            "store_backend": "None",
        }


def _stored(hashes: list[int], tokens: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=tokens,
        block_size=BLOCK,
        lora_id=None,
        medium=GPU,
        lora_name=None,
    )


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def publisher_status(url: str, name: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
        try:
            publishers = (await http.get(f"{url}/publishers")).json()["publishers"]
        except httpx.HTTPError:
            return {"state": "away"}
    return next((dict(one) for one in publishers if one["instance_id"] == name), {"state": "none"})


async def same_as(stack: EmbeddedStack, engine: Engine, ingest_url: str, seconds: float = 40.0) -> float:
    """Wait until the index has exactly what the engine holds and ingest says `live`; the time it took."""
    began = time.monotonic()
    found: object = None
    async with httpx.AsyncClient(base_url=stack.router_url, timeout=10.0, trust_env=False) as http:
        while True:
            status = await publisher_status(ingest_url, engine.name)
            try:
                workers = (await http.get("/workers")).json()["workers"]
                found = next(
                    (one["endpoints"]["0"]["npu_blocks"] for one in workers if one["instance_id"] == engine.name), 0
                )
            except (httpx.HTTPError, KeyError):
                found = None
            idle = status["state"] == "live" and status["messages"]["pending"] == 0
            if idle and found == len(engine.held):
                break
            assert time.monotonic() - began < seconds, f"{found} blocks, engine has {len(engine.held)}; {status}"
            await asyncio.sleep(0.05)
        took = time.monotonic() - began
        for tokens in list(engine.held.values())[:50]:
            answer = await http.post("/query", json={"model": MODEL, "block_size": BLOCK, "token_ids": tokens})
            assert answer.json()["default"][engine.name]["longest_matched"] == BLOCK
    assert status["unaccounted_messages"] == 0
    messages = status["messages"]
    assert messages["received"] == messages["published"] + sum(messages["dropped"].values()) + sum(
        messages["rejected"].values()
    )
    return took


async def stored_batches(nats_url: str) -> list[EventBatch]:
    client = await nats.connect(nats_url)
    js = client.jetstream()
    count = (await js.stream_info(EVENTS_STREAM)).state.messages
    subscription = await js.subscribe(EVENTS_ALL, ordered_consumer=True)
    batches = [decode_event_batch((await subscription.next_msg(timeout=5)).data) for _ in range(count)]
    await client.close()
    return batches


def numbers_of(batches: list[EventBatch]) -> list[int]:
    return [seq for batch in batches for seq in range(batch.first_seq, batch.last_seq + 1)]


async def test_what_is_published_while_ingest_is_dead_is_asked_for_afterwards(context: zmq.asyncio.Context) -> None:
    async with EmbeddedStack(StackOptions(any_ports=True, environment=PATIENCE)) as stack:
        engine = Engine("one", context)
        await register(stack.router_url, [engine.registration()], lambda _: None)
        await engine.publisher.subscribed()
        for _ in range(2):
            await engine.load(1.0)
            os.kill(stack.pids["ingest"], signal.SIGKILL)
            await engine.load(1.0)
        measured("ingest killed", await same_as(stack, engine, stack.addresses.url("ingest")))
        assert numbers_of(await stored_batches(stack.nats_url)) == list(range(engine.publisher.sequence))
        await engine.publisher.close()


async def test_a_restart_of_the_engine_while_ingest_is_dead_leaves_nothing_of_the_old_one(
    context: zmq.asyncio.Context,
) -> None:
    async with EmbeddedStack(StackOptions(any_ports=True, environment=PATIENCE)) as stack:
        engine = Engine("one", context)
        await register(stack.router_url, [engine.registration()], lambda _: None)
        await engine.publisher.subscribed()
        await engine.load(1.0)
        os.kill(stack.pids["ingest"], signal.SIGKILL)
        before = engine.publisher.sequence
        engine.publisher.restart()
        engine.held.clear()
        while engine.publisher.sequence <= before + 5:  # past the old number before anybody listens
            engine.act()
        measured("ingest killed, engine restarted", await same_as(stack, engine, stack.addresses.url("ingest")))
        await engine.publisher.close()


@pytest.mark.timeout(120)
async def test_na_01_nats_away_for_longer_than_the_buffer_lasts_is_gapped_and_then_made_good(
    context: zmq.asyncio.Context,
) -> None:
    environment = PATIENCE | {"KVROUTE_INGEST__BUFFER_BYTES_PER_PUBLISHER": "65536"}
    async with EmbeddedStack(StackOptions(any_ports=True, environment=environment)) as stack:
        ingest_url = stack.addresses.url("ingest")
        engine = Engine("one", context, padding=100)
        await register(stack.router_url, [engine.registration()], lambda _: None)
        await engine.publisher.subscribed()
        await engine.load(0.5)
        os.kill(stack.pids["nats"], signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 30
            while (status := await publisher_status(ingest_url, "one"))["state"] != "gapped":
                assert time.monotonic() < deadline, status
                await engine.load(0.2, 300)
            assert status["messages"]["dropped"]["buffer_full"] > 0
            assert status["buffered_bytes"] < 200_000
        finally:
            os.kill(stack.pids["nats"], signal.SIGCONT)
        measured("nats frozen", await same_as(stack, engine, ingest_url))
        await engine.publisher.close()


@pytest.mark.timeout(120)
async def test_t09_two_ingests_on_one_engine_store_every_message_once_and_either_may_die(
    context: zmq.asyncio.Context,
) -> None:
    async with EmbeddedStack(StackOptions(any_ports=True, environment=PATIENCE)) as stack:
        port = free_port()
        other_url = f"http://127.0.0.1:{port}"
        # Another linger cuts batches differently.
        environment = os.environ | PATIENCE
        environment |= {"KVROUTE_NATS__URL": stack.nats_url, "KVROUTE_INGEST__PORT": str(port)}
        environment |= {"KVROUTE_INGEST__LINGER": "0.02", "PYTHONPATH": os.getcwd()}
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.ingest"), env=environment, stdout=-3, stderr=-3
        )
        try:
            engine = Engine("one", context)
            await register(stack.router_url, [engine.registration()], lambda _: None)
            urls = (stack.addresses.url("ingest"), other_url)
            deadline = time.monotonic() + 20
            while not all([(await publisher_status(url, "one")).get("connected") for url in urls]):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await engine.load(2.0)
            engine.publisher.restart()
            engine.held.clear()
            await engine.load(2.0)
            os.kill(stack.pids["ingest"], signal.SIGKILL)
            await engine.load(2.0)
            measured("one of two ingests killed", await same_as(stack, engine, other_url))
            await same_as(stack, engine, urls[0])
            batches = await stored_batches(stack.nats_url)
            lives = sorted({batch.generation for batch in batches})
            assert len(lives) == 2
            first, second = ([batch for batch in batches if batch.generation == life] for life in lives)
            assert batches == first + second
            assert numbers_of(first) == list(range(len(numbers_of(first))))
            assert numbers_of(second) == list(range(engine.publisher.sequence))
            await engine.publisher.close()
        finally:
            other.kill()
            await other.wait()


@pytest.mark.timeout(120)
async def test_a_fifth_of_all_messages_lost_costs_at_most_two_percent_of_the_hits() -> None:
    hits = {}
    async with EmbeddedStack(StackOptions(any_ports=True, environment=PATIENCE)) as stack:
        for faults in ((), ("drop=0.2",)):
            async with Subject(stack, *faults, npu_blocks=160) as subject:
                await subject.register()
                await subject.settle("live")
                hits[faults] = 0
                for _ in range(150):
                    await subject.ask(1)
                    prompt = subject.chance.choice(subject.prompts)
                    body = {"model": subject.model, "block_size": BLOCK, "token_ids": prompt}
                    answer = (await subject.router.post("/query", json=body)).json()["default"][subject.name]
                    hits[faults] += answer["DP"]["0"]["npu_blocks"]
                    # Turns of real requests are further apart than this.
                    await asyncio.sleep(0.06)
    clean, lossy = hits[()], hits["drop=0.2",]
    assert clean > 300
    assert abs(clean - lossy) <= 0.02 * clean, hits


async def test_t20_and_po_05_a_pool_with_a_gap_says_so_and_its_restart_drops_all_it_held(
    context: zmq.asyncio.Context,
) -> None:
    async with EmbeddedStack(StackOptions(any_ports=True, environment=PATIENCE)) as stack:
        url = stack.addresses.url("ingest")
        engine, pool = Engine("one", context), PoolStub(context, MODEL, BLOCK)
        host = pool.publisher.endpoint
        body = {"instance_id": "pool", "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": 0}
        await register(stack.router_url, [engine.registration() | {"store_backend": "Memcache"}], lambda _: None)
        await register(stack.router_url, [body | {"endpoint": host, "store_backend": "Memcache"}], lambda _: None)
        await asyncio.gather(engine.publisher.subscribed(), pool.publisher.subscribed())
        engine.publisher.publish(encode_batch(time.time(), [_stored([11], [1, 2, 3, 4])], 0))

        async def cpu_blocks() -> int:
            async with httpx.AsyncClient(base_url=stack.router_url, timeout=5.0, trust_env=False) as http:
                workers = (await http.get("/workers")).json()["workers"]
            return next((one["endpoints"]["0"]["cpu_blocks"] for one in workers if one["instance_id"] == "pool"), -1)

        async def until(state: str, blocks: int) -> dict[str, Any]:
            deadline = time.monotonic() + 15
            while True:
                status, found = await publisher_status(url, "pool"), await cpu_blocks()
                if (status["state"], found) == (state, blocks):
                    return status
                assert time.monotonic() < deadline, (status, found)
                await asyncio.sleep(0.05)

        pool.publish("stored", "10.0.0.9", 11)
        await until("live", 1)
        pool.publisher.consume()
        pool.publish("stored", "10.0.0.8", 11)
        gapped = await until("gapped", 2)
        assert gapped["missed"] == 1
        pool.publisher.restart()
        pool.publish("stored", "10.0.0.7", 11)
        restarted = await until("live", 1)
        assert restarted["generation"] > gapped["generation"]
        await engine.publisher.close()
        await pool.publisher.close()


async def test_a_resync_begins_anew_from_what_the_engine_still_tells(context: zmq.asyncio.Context) -> None:
    async with EmbeddedStack(StackOptions(any_ports=True, environment=PATIENCE)) as stack:
        url = stack.addresses.url("ingest")
        engine = Engine("one", context)
        await register(stack.router_url, [engine.registration()], lambda _: None)
        await engine.publisher.subscribed()
        await engine.load(0.5)
        await same_as(stack, engine, url)
        before = (await publisher_status(url, "one"))["generation"]
        client = await nats.connect(stack.nats_url)
        await client.publish(resync_subject("engine", "one", 0))
        await client.publish(resync_subject("engine", "nobody", 0))
        await client.publish("kv.control.resync.nonsense")
        await client.close()
        deadline = time.monotonic() + 10
        while (await publisher_status(url, "one"))["generation"] == before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await same_as(stack, engine, url)
        await engine.publisher.close()
