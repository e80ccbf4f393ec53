"""Freshness over a real NATS: what ingest and the coordinator write reaches queries, /workers and metrics."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from nats.aio.client import Client

from schemas.blocks import Tier, content_hashes, pack_hashes, token_bytes
from schemas.events import WIRE_VERSION, IndexBatch, IndexGroup, IndexStored, Worker, encode
from schemas.liveness import Liveness, LivenessState, dump_liveness
from schemas.streams import StreamRecord, StreamState, dump_stream_record
from schemas.subjects import LIVENESS_BUCKET, STREAMS_BUCKET, engine_key, index_subject, stream_key
from services.router.app import start
from services.router.settings import RouterSettings
from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.settings import NatsSettings
from tests.conftest import ServerProcess, free_port, make_nats_server

MODEL, BLOCK, TOKENS, STALE_AFTER = "m", 4, list(range(12)), 1.0


class Router:
    def __init__(self, port: int, client: Client) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False)
        self.js = client.jetstream()
        self.generation = 0
        self.following = ""

    async def register(self) -> None:
        body = {"instance_id": "a", "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": 0}
        body |= {"medium_endpoints": {"npu": "tcp://10.0.0.1:5557"}, "store_backend": "None"}
        assert (await self.http.post("/register", json=body)).status_code == 201
        self.generation = (await self.endpoint())["generation"]
        contents = content_hashes(token_bytes(TOKENS), BLOCK).tobytes()
        event = IndexStored(Worker("a", 0), Tier.NPU, pack_hashes([1, 2, 3]), None, contents)
        group = IndexGroup(1, "engine", "a", 0, self.generation, 1, 1, time.time(), [event])
        await self.js.publish(
            index_subject(MODEL, "default"), encode(IndexBatch(WIRE_VERSION, MODEL, "default", [group]))
        )

    async def endpoint(self) -> dict[str, Any]:
        workers = (await self.http.get("/workers")).json()["workers"]
        found: dict[str, Any] = workers[0]["endpoints"]["0"]
        return found

    async def says(self, state: StreamState, since: float = 0.0) -> None:
        now = time.time()
        record = StreamRecord(
            source="engine",
            instance_id="a",
            dp_rank=0,
            model=MODEL,
            tenant="default",
            state=state,
            generation=self.generation,
            state_since=now - since,
            written_at=now,
            writer="test",
            coverage=0.9,
            last_message_at=now,
        )
        bucket = await self.js.key_value(STREAMS_BUCKET)
        await bucket.put(stream_key("engine", "a", 0), dump_stream_record(record))

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """Matched tokens and the stream beside them."""
        answer = await self.http.post("/query", json={"model": MODEL, "block_size": BLOCK, "token_ids": TOKENS})
        self.following = answer.headers["x-kvroute-index"]
        instance = answer.json()["default"]["a"]
        return instance["longest_matched"], instance["streams"]["0"]

    async def until(self, condition: Callable[[int, dict[str, Any]], bool], what: str, renew: bool = False) -> None:
        give_up = time.monotonic() + 15
        while not condition(*await self.answer()):
            assert time.monotonic() < give_up, f"{what}: {await self.answer()}"
            if renew:
                await self.says(StreamState.LIVE)
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def router_at(url: str, client: Client) -> AsyncIterator[Router]:
    port = free_port()
    settings = RouterSettings(host="127.0.0.1", port=port, stale_after=STALE_AFTER)
    async with start(
        Config(nats=NatsSettings(url=url, stream_state_ttl=STALE_AFTER), router=settings), Health("router")
    ):
        router = Router(port, client)
        await router.register()
        yield router
        await router.http.aclose()


@pytest.fixture
async def router(nats_client: Client, nats_server: ServerProcess) -> AsyncIterator[Router]:
    async with router_at(nats_server.url, nats_client) as router:
        yield router


async def test_a_stream_that_stays_stale_takes_its_blocks_along_and_brings_them_back(router: Router) -> None:
    await router.says(StreamState.LIVE)
    await router.until(lambda tokens, stream: (tokens, stream["state"]) == (12, "live"), "offered")
    await router.says(StreamState.STALE, since=STALE_AFTER)
    await router.until(lambda tokens, stream: (tokens, stream["offered"]) == (0, False), "hidden")
    await router.says(StreamState.LIVE)
    await router.until(lambda tokens, stream: (tokens, stream["state"]) == (12, "live"), "offered again")
    endpoint = await router.endpoint()
    assert endpoint["npu_blocks"] == 3
    stream = endpoint["stream"]
    assert (stream["state"], stream["coverage"], stream["offered"], stream["health"]) == ("live", 0.9, True, "unknown")
    text = (await router.http.get("/metrics")).text
    labels = 'dp_rank="0",instance_id="a",source="engine"'
    assert f'kvroute_router_stream_state{{{labels},state="live"}} 1.0' in text
    assert f'kvroute_router_stream_state{{{labels},state="gapped"}} 0.0' in text
    assert f"kvroute_router_stream_coverage{{{labels}}} 0.9" in text
    assert f"kvroute_router_stream_offered{{{labels}}} 1.0" in text


async def test_when_ingest_falls_silent_its_streams_become_stale(router: Router) -> None:
    await router.says(StreamState.LIVE)
    await router.until(lambda tokens, stream: (tokens, stream["state"]) == (12, "live"), "offered")
    await router.until(lambda tokens, stream: (tokens, stream["state"]) == (0, "stale"), "hidden")


async def test_a_dead_engine_is_not_offered_and_comes_back(router: Router) -> None:
    bucket = await router.js.key_value(LIVENESS_BUCKET)

    async def health(state: LivenessState) -> None:
        now = time.time()
        await bucket.put(engine_key("a", 0), dump_liveness(Liveness("a", 0, state, now, now, reason="status 503")))

    await health(LivenessState.DEAD)
    await router.until(lambda tokens, stream: tokens == 0 and stream["health"] == "dead", "hidden", renew=True)
    assert (await router.answer())[1]["reason"] == "health check: status 503"
    await health(LivenessState.ALIVE)
    await router.until(lambda tokens, stream: tokens == 12 and stream["health"] == "alive", "back", renew=True)


async def test_an_unregistered_publisher_leaves_no_series_behind(router: Router) -> None:
    await router.says(StreamState.LIVE)
    await router.until(lambda tokens, stream: stream["state"] == "live", "live")
    assert 'kvroute_router_stream_state{dp_rank="0",instance_id="a"' in (await router.http.get("/metrics")).text
    body = {"instance_id": "a", "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": 0}
    assert (await router.http.post("/unregister", json=body)).status_code == 200
    give_up = time.monotonic() + 10
    while 'kvroute_router_stream_state{dp_rank="0"' in (await router.http.get("/metrics")).text:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)


async def test_a_router_that_lost_nats_goes_on_answering_from_what_it_knew_labelled(tmp_path: Any) -> None:
    import nats

    server = make_nats_server(tmp_path)
    server.start()
    client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    async with router_at(server.url, client) as router:
        await router.says(StreamState.LIVE)
        await router.until(lambda tokens, stream: (tokens, stream["state"]) == (12, "live"), "offered")
        assert router.following == "current"
        await asyncio.to_thread(server.kill)
        await router.until(lambda tokens, stream: stream["state"] == "stale", "labelled")
        ends = time.monotonic() + 2 * STALE_AFTER
        while time.monotonic() < ends:
            tokens, stream = await router.answer()
            assert (tokens, stream["offered"], router.following) == (12, True, "disconnected")
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.start)
        await router.until(lambda tokens, stream: router.following == "current", "back")
        await client.flush(timeout=10)
        await router.says(StreamState.LIVE)
        await router.until(lambda tokens, stream: (tokens, stream["state"]) == (12, "live"), "live again")
    await client.close()
    server.stop()
