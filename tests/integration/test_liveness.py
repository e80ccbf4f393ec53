"""Health checks of engines over real HTTP and NATS: one coordinator asks, everybody knows."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, DeliverPolicy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from schemas.events import IndexCleared, Worker, decode_index_batch
from schemas.liveness import LivenessState
from schemas.registry import EngineRecord
from schemas.streams import StreamRecord, StreamState, dump_stream_record
from schemas.subjects import STREAMS_BUCKET, stream_key
from services.coordinator.liveness.clearing import clear_npu
from services.coordinator.liveness.prober import Prober
from services.coordinator.liveness.settings import LivenessSettings
from services.runtime import liveness_view
from services.runtime.broker import ensure_streams
from services.runtime.http_server import HttpServer
from services.runtime.liveness_view import LivenessView
from services.runtime.registry_store import Registry
from services.runtime.settings import NatsSettings

SETTINGS = LivenessSettings(
    interval=0.05, timeout=0.3, failures=3, sleep_interval=0.1, repeat_interval=0.2, lease_ttl=0.6
)


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


class FakeEngine:
    """An HTTP server whose health can be chosen."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = False
        self.asleep = False
        self.asked = 0
        self.server = HttpServer(
            Starlette(routes=[Route("/health", self._health), Route("/metrics", self._metrics)]), "127.0.0.1", 0
        )

    async def _health(self, request: Request) -> Response:
        self.asked += 1
        if self.hangs:
            await asyncio.sleep(5)
        return Response(status_code=self.status)

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(f"vllm:engine_sleep_state {int(self.asleep)}\n")

    def record(self, name: str = "a", rank: int = 0) -> EngineRecord:
        url = f"http://127.0.0.1:{self.server.port}"
        return EngineRecord(instance_id=name, dp_rank=rank, model="m", block_size=4, generation=7, url=url)


class World:
    def __init__(self, client: Client) -> None:
        self.js = client.jetstream()
        self.view = LivenessView(self.js)
        self.registry = Registry()
        self.probers: list[Prober] = []

    async def prober(self) -> Prober:
        prober = Prober(self.js, lambda: self.registry, SETTINGS, lambda engine: clear_npu(self.js, engine))
        self.probers.append(prober)
        prober.start()
        return prober

    def register(self, *records: EngineRecord) -> None:
        self.registry = Registry({(one.instance_id, one.dp_rank): one for one in records})

    def state(self, name: str = "a", rank: int = 0) -> LivenessState | None:
        found = self.view.of(name, rank)
        return found.state if found else None


@pytest.fixture
async def world(nats_client: Client) -> AsyncIterator[World]:
    await ensure_streams(nats_client.jetstream(), NatsSettings())
    world = World(nats_client)
    world.view.start()
    yield world
    for prober in world.probers:
        await prober.stop()
    await world.view.stop()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    await engine.server.start()
    yield engine
    with contextlib.suppress(Exception):
        await engine.server.stop(0)


async def test_a_dead_engine_is_known_and_comes_back_when_it_answers_again(world: World, engine: FakeEngine) -> None:
    world.register(engine.record(), engine.record(rank=1))
    await world.prober()
    await until(lambda: world.state() is world.state(rank=1) is LivenessState.ALIVE, "alive")
    engine.status = 503
    await until(lambda: world.state() is world.state(rank=1) is LivenessState.DEAD, "dead")
    found = world.view.of("a", 0)
    assert found is not None
    assert (found.reason, found.generation) == ("status 503", 7)
    engine.status = 200
    await until(lambda: world.state() is LivenessState.ALIVE, "alive again")


async def test_an_engine_that_hangs_or_is_gone_is_dead(world: World, engine: FakeEngine) -> None:
    world.register(engine.record())
    await world.prober()
    await until(lambda: world.state() is LivenessState.ALIVE, "alive")
    engine.hangs = True
    await until(lambda: world.state() is LivenessState.DEAD, "dead")
    assert "no answer within" in str(world.view.of("a", 0))
    engine.hangs = False
    await until(lambda: world.state() is LivenessState.ALIVE, "alive")
    await engine.server.stop(0)
    await until(lambda: world.state() is LivenessState.DEAD, "dead")


async def test_po_09_idle_is_not_dead_and_an_engine_without_url_is_unknown(world: World, engine: FakeEngine) -> None:
    engine.status = 404  # it has no such page, but it answers
    silent = EngineRecord(instance_id="silent", model="m", block_size=4, generation=1)
    world.register(engine.record(), silent)
    await world.prober()
    await until(lambda: world.state() is LivenessState.ALIVE, "alive")
    assert world.state("silent") is None
    asked = engine.asked
    await until(lambda: engine.asked > asked + 10, "many checks")
    assert world.state() is LivenessState.ALIVE


async def test_one_coordinator_asks_at_a_time_and_another_goes_on(world: World, engine: FakeEngine) -> None:
    world.register(engine.record())
    first = await world.prober()
    await until(lambda: world.state() is LivenessState.ALIVE, "alive")
    second = await world.prober()
    await asyncio.sleep(SETTINGS.lease_ttl)
    assert not second._health, "the second one has asked too"
    await first.stop()
    engine.status = 500
    await until(lambda: world.state() is LivenessState.DEAD, "dead, says the second")


async def test_what_was_unregistered_leaves_no_record(world: World, engine: FakeEngine) -> None:
    world.register(engine.record(), engine.record("b"))
    prober = await world.prober()
    await until(lambda: world.state() is world.state("b") is LivenessState.ALIVE, "alive")
    world.register(engine.record("b"))
    await until(lambda: world.state() is None, "a is gone")
    await prober.stop()
    world.register()
    await world.prober()
    await until(lambda: world.state("b") is None, "b, unregistered while nobody asked, is gone")


async def test_a_verdict_that_nobody_repeats_is_void(
    world: World, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_view, "VOID_SECONDS", 0.5)
    world.register(engine.record())
    engine.status = 500
    prober = await world.prober()
    await until(lambda: world.state() is LivenessState.DEAD, "dead")
    give_up = time.monotonic() + 1.0
    while time.monotonic() < give_up:
        assert world.state() is LivenessState.DEAD
        await asyncio.sleep(0.02)
    await prober.stop()
    await until(lambda: world.state() is None, "unknown")


async def test_ex_04_a_sleeping_engines_npu_blocks_are_cleared_within_a_scrape(
    world: World, engine: FakeEngine
) -> None:
    world.register(engine.record())
    bucket = await world.js.key_value(STREAMS_BUCKET)
    restarted = StreamRecord(
        source="engine",
        instance_id="a",
        dp_rank=0,
        model="m",
        tenant="default",
        state=StreamState.LIVE,
        generation=9,
        state_since=1.0,
        written_at=1.0,
        writer="test",
        coverage=1.0,
    )
    await bucket.put(stream_key("engine", "a", 0), dump_stream_record(restarted))
    await world.prober()
    await until(lambda: world.state() is LivenessState.ALIVE, "alive")
    engine.asleep = True
    await until(lambda: world.state() is LivenessState.ASLEEP, "asleep")
    config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    subscription = await world.js.subscribe("kv.index.>", ordered_consumer=True, config=config)
    (group,) = decode_index_batch((await subscription.next_msg(timeout=5)).data).groups
    assert group.generation == 9, "not that of its registration: it has restarted since"
    assert group.events == [IndexCleared(Worker("a", 0), ("npu",))]  # type: ignore[arg-type]
    await subscription.unsubscribe()
    engine.asleep = False
    await until(lambda: world.state() is LivenessState.ALIVE, "awake")
