"""The router as a service: its HTTP API over a real port, real NATS behind it."""

import asyncio
import contextlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from nats.aio.client import Client

from schemas.blocks import Tier, content_hashes, pack_hashes, token_bytes
from schemas.events import (
    WIRE_VERSION,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexStored,
    Location,
    Worker,
    encode,
)
from schemas.subjects import INDEX_STREAM, index_subject
from services.router.app import start
from services.router.http_api import RouterApi
from services.router.index.plain import PlainIndex
from services.router.openapi import OPENAPI
from services.router.settings import RouterSettings
from services.router.spaces import Spaces
from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.logging import configure_logging
from services.runtime.metrics import REGISTRY
from services.runtime.settings import LoggingSettings, NatsSettings
from tests.conftest import ServerProcess, free_port, make_nats_server, wait_for

MODEL, BLOCK = "m", 4
TOKENS = list(range(1, 13))


class Router:
    """A router in this process and a client of it."""

    def __init__(self, port: int, health: Health, nats_client: Client | None) -> None:
        self.port = port
        self.health = health
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0, trust_env=False)
        self.nats = nats_client

    async def register(self, instance_id: str, dp_rank: int = 0, **changes: Any) -> httpx.Response:
        return await self.http.post("/register", json=registration(instance_id, dp_rank, **changes))

    async def unregister(self, instance_id: str, dp_rank: int = 0) -> httpx.Response:
        return await self.http.post("/unregister", json=registration(instance_id, dp_rank))

    async def generation(self, instance_id: str, dp_rank: int = 0) -> int:
        workers = (await self.http.get("/workers")).json()["workers"]
        (worker,) = [worker for worker in workers if worker["instance_id"] == instance_id]
        return int(worker["endpoints"][str(dp_rank)]["generation"])

    async def query(self, tokens: list[int] = TOKENS, **changes: Any) -> httpx.Response:
        return await self.http.post("/query", json={"model": MODEL, "block_size": BLOCK, "token_ids": tokens} | changes)

    async def instances(self, **changes: Any) -> dict[str, Any]:
        answer = await self.query(**changes)
        assert answer.status_code == 200, answer.text
        instances: dict[str, Any] = answer.json()["default"]
        return instances

    async def publish(self, *events: IndexEvent, source: str = "engine", instance: str = "a", **group: Any) -> None:
        """What the matcher would publish; returns when it is applied."""
        assert self.nats is not None
        fields = {"source_sequence": 0, "dp_rank": 0, "generation": 0, "first_seq": 1, "last_seq": 1} | group
        fields["generation"] = fields["generation"] or await self.generation(instance)
        made = IndexGroup(
            source=source, instance_id=instance, received_at=time.time(), events=list(events), **fields  # type: ignore[arg-type]
        )  # fmt: skip
        body = encode(IndexBatch(WIRE_VERSION, MODEL, "default", [made]))
        stored = await self.nats.jetstream().publish(index_subject(MODEL, "default"), body)
        give_up = time.monotonic() + 15.0
        while await self.metric("kvroute_router_stream_position") < stored.seq:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.005)

    async def metric(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0] == name)


def registration(instance_id: str, dp_rank: int = 0, **changes: Any) -> dict[str, Any]:
    body = {"instance_id": instance_id, "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": dp_rank}
    return body | {"store_backend": "Memcache"} | changes


def stored(holder: Worker | Location, tier: Tier = Tier.NPU, first: int = 0, blocks: int = 3) -> IndexStored:
    contents = content_hashes(token_bytes(TOKENS), BLOCK)[first : first + blocks]
    names = pack_hashes(range(first + 1, first + 1 + blocks))
    teacher = Worker("a", 0) if isinstance(holder, Location) else None
    return IndexStored(holder, tier, names, first or None, contents.tobytes(), 0, BLOCK, False, teacher)


@contextlib.asynccontextmanager
async def running(nats_url: str, client: Client | None = None, **settings: Any) -> AsyncIterator[Router]:
    port = free_port()
    router_settings = RouterSettings(host="127.0.0.1", port=port, **settings)
    config = Config(nats=NatsSettings(url=nats_url), router=router_settings)
    health = Health("router")
    async with start(config, health):
        router = Router(port, health, client)
        give_up = time.monotonic() + 20.0
        while not health.ready:
            assert time.monotonic() < give_up, health.report()
            await asyncio.sleep(0.01)
        yield router
        await router.http.aclose()


@pytest.fixture
async def router(nats_client: Client, nats_server: ServerProcess) -> AsyncIterator[Router]:
    async with running(nats_server.url, nats_client) as router:
        yield router


async def test_before_nats_is_reached_the_router_answers_that_it_starts(tmp_path: Path) -> None:
    server = make_nats_server(tmp_path)
    health, port = Health("router"), free_port()
    config = Config(nats=NatsSettings(url=server.url), router=RouterSettings(host="127.0.0.1", port=port))
    ended = asyncio.Event()

    async def run() -> None:
        async with start(config, health):
            await ended.wait()

    running_router = asyncio.create_task(run())
    router = Router(port, health, None)
    await asyncio.to_thread(wait_for, lambda: "waiting for NATS" in str(health.report()), "a router that waits")
    assert (await router.http.get("/health")).text == "OK"
    answers = [await router.query(), await router.register("a"), await router.unregister("a")]
    answers.append(await router.http.post("/events", json={"instance_id": "a", "events": []}))
    answers.append(await router.http.get("/workers"))
    assert [answer.status_code for answer in answers] == [503] * 5
    assert all("starting" in answer.json()["error"] for answer in answers)
    assert answers[0].headers["x-kvroute-outcome"] == "starting"
    ready = await router.http.get("/readyz")
    assert (ready.status_code, "waiting for NATS" in ready.text) == (503, True)
    await asyncio.to_thread(server.start)
    await asyncio.to_thread(wait_for, lambda: health.ready, "a ready router")
    assert (await router.register("a")).status_code == 201
    ended.set()
    await running_router
    await router.http.aclose()
    server.stop()


async def test_a_registration_is_in_the_next_answer_and_an_unregistration_too(router: Router) -> None:
    for number in range(10):
        assert (await router.register(f"i{number}")).status_code == 201
        assert f"i{number}" in await router.instances()
    for number in range(10):
        assert (await router.unregister(f"i{number}")).status_code == 200
        assert f"i{number}" not in await router.instances()


async def test_local_and_remote_pool_blocks_and_a_node_nobody_registered(router: Router) -> None:
    await router.register("a", medium_endpoints={"npu": "tcp://10.0.0.5:5557"})
    await router.register("b", medium_endpoints={"npu": "tcp://10.0.0.6:5557"})
    await router.register("pool", endpoint="tcp://10.0.0.1:5557")
    await router.publish(stored(Worker("a", 0), blocks=1))
    pool = {"source": "pool", "instance": "pool"}
    await router.publish(stored(Location("pool", "10.0.0.5"), Tier.CPU, first=1, blocks=1), **pool)
    await router.publish(stored(Location("pool", "10.9.9.9"), Tier.DISK, first=2, blocks=1), **pool)
    instances = await router.instances()
    assert set(instances) == {"a", "b"}
    counts = instances["a"]["DP"]["0"]
    assert (counts["npu_blocks"], counts["cpu_local_blocks"], counts["disk_remote_blocks"]) == (1, 1, 1)
    assert (counts["cpu_remote_blocks"], counts["disk_local_blocks"], counts["matched_tokens"]) == (0, 0, 12)
    assert instances["b"]["longest_matched"] == 0
    workers = (await router.http.get("/workers")).json()["workers"]
    (entry,) = [worker["endpoints"]["0"] for worker in workers if worker["instance_id"] == "pool"]
    assert {name: (held["cpu_blocks"], held["disk_blocks"]) for name, held in entry["locations"].items()} == {
        "10.0.0.5": (1, 0),
        "10.9.9.9": (0, 1),
    }


async def test_workers_say_how_far_each_publisher_was_followed(router: Router) -> None:
    await router.register("a")
    endpoint = (await router.http.get("/workers")).json()["workers"][0]["endpoints"]["0"]
    assert (endpoint["last_seq"], endpoint["last_event_at"], endpoint["npu_blocks"]) == (None, None, 0)
    orphan = IndexStored(Worker("a", 0), Tier.NPU, pack_hashes([99]), 98, pack_hashes([1]))
    await router.publish(stored(Worker("a", 0)), orphan, source_sequence=7, last_seq=41)
    endpoint = (await router.http.get("/workers")).json()["workers"][0]["endpoints"]["0"]
    assert (endpoint["last_seq"], endpoint["events"]) == (41, 2)
    assert 0 <= endpoint["seconds_since_last_event"] < 60
    assert (endpoint["npu_blocks"], endpoint["waiting_blocks"]) == (3, 1)


async def test_bs_05_a_zero_says_why(router: Router) -> None:
    async def outcome(**changes: Any) -> str:
        return str((await router.query(**changes)).headers["x-kvroute-outcome"])

    assert await outcome() == "no_index"
    await router.register("a")
    await router.publish(stored(Worker("a", 0)))
    before = await router.metric('kvroute_router_queries_total{outcome="shorter_than_block",route="/query"}')
    assert await outcome() == "hit"
    assert await outcome(tokens=[500] * 8) == "miss"
    assert await outcome(tokens=TOKENS[:3]) == "shorter_than_block"
    assert await outcome(block_size=8) == "other_block_size"
    assert await outcome(token_ids="x") == "refused"
    after = await router.metric('kvroute_router_queries_total{outcome="shorter_than_block",route="/query"}')
    assert after - before == 1


async def test_answers_for_one_instance_and_in_the_dialect_asked_for(router: Router) -> None:
    await router.register("a")
    await router.register("b")
    await router.publish(stored(Worker("a", 0)))
    assert set(await router.instances(instance_id="b")) == {"b"}
    assert await router.instances(instance_id="nobody") == {}
    tokens = {"longest_matched": 12, "GPU": 12, "CPU": 0, "DISK": 0, "DP": {"0": 12}}
    answer = (await router.instances(dialect="mooncake"))["a"]
    assert set(answer.pop("streams")) == {"0"}
    assert answer == tokens
    assert "npu_blocks" in (await router.instances())["a"]["DP"]["0"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_413_and_the_connection_goes_on(
    nats_client: Client, nats_server: ServerProcess, chunked: bool
) -> None:
    async with running(nats_server.url, nats_client, max_body_bytes=10_000, max_tokens=1000) as router:
        await router.register("a")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield bytes(1000)

        content: Any = chunks() if chunked else bytes(20_000)
        headers = {"content-type": "application/octet-stream"}
        answer = await router.http.post(f"/query?model={MODEL}&block_size=4", content=content, headers=headers)
        assert (answer.status_code, "router.max_body_bytes" in answer.json()["error"]) == (413, True)
        answer = await router.query([1] * 1001)
        assert (answer.status_code, "router.max_tokens" in answer.json()["error"]) == (413, True)
        assert (await router.query()).status_code == 200


async def test_json_msgpack_and_raw_bodies_get_equal_answers(router: Router) -> None:
    await router.register("a")
    await router.publish(stored(Worker("a", 0)))
    body: dict[str, Any] = {"model": MODEL, "block_size": BLOCK, "token_ids": TOKENS}
    raw = struct.pack("<12I", *TOKENS)
    expected = (await router.query()).json()
    for token_ids in (TOKENS, raw):
        answer = await router.http.post(
            "/query",
            content=msgpack.packb(body | {"token_ids": token_ids}),
            headers={"content-type": "application/x-msgpack"},
        )
        assert answer.headers["content-type"] == "application/msgpack"
        assert msgpack.unpackb(answer.content) == expected
    answer = await router.http.post(
        f"/query?model={MODEL}&block_size={BLOCK}", content=raw, headers={"content-type": "application/octet-stream"}
    )
    assert answer.json() == expected
    answer = await router.http.post(
        "/query_by_hash?model=m", content=raw, headers={"content-type": "application/octet-stream"}
    )
    assert answer.status_code == 415


async def test_events_posted_to_one_replica_reach_the_other(
    nats_client: Client, nats_server: ServerProcess, router: Router
) -> None:
    await router.register("a")
    async with running(nats_server.url, nats_client) as other:
        blocks = 40_000
        tokens = [token % 60_000 for token in range(blocks * BLOCK)]
        event = {"event_id": 1, "event_type": "stored", "block_hashes": list(range(1, blocks + 1)), "token_ids": tokens}
        answer = await router.http.post("/events", json={"instance_id": "a", "events": [event]})
        assert answer.json() == {"status": "ok", "events_applied": 1}
        assert (await router.instances(tokens=tokens))["a"]["longest_matched"] == blocks * BLOCK
        give_up = time.monotonic() + 15.0
        while (await other.instances(tokens=tokens))["a"]["longest_matched"] != blocks * BLOCK:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.02)


async def test_ex_06_registering_waits_for_no_queue_and_the_dead_stay_dead(router: Router) -> None:
    await router.register("a")
    generation = await router.generation("a")
    assert router.nats is not None
    js = router.nats.jetstream()
    events = [stored(Worker("a", 0)), IndexCleared(Worker("a", 0), (Tier.NPU,))] * 1000
    last = 0
    for _ in range(25):
        group = IndexGroup(0, "engine", "a", 0, generation, 1, 1, time.time(), list(events))
        body = encode(IndexBatch(WIRE_VERSION, MODEL, "default", [group]))
        last = (await js.publish(index_subject(MODEL, "default"), body)).seq
    assert await router.metric("kvroute_router_stream_position") < last
    await router.unregister("a")
    took = []
    for number in range(5):
        started = time.perf_counter()
        assert (await router.register(f"b{number}")).status_code == 201
        took.append(time.perf_counter() - started)
    assert min(took) < 0.1, took
    give_up = time.monotonic() + 30.0
    while await router.metric("kvroute_router_stream_position") < last:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)
    assert set(await router.instances()) == {f"b{number}" for number in range(5)}
    (space,) = (await router.http.get("/workers")).json()["indexer"]
    assert space["total_blocks"] == 0


async def test_t39_names_from_requests_make_no_series(router: Router) -> None:
    await router.register("a")
    for number in range(20):
        await router.query(model=f"nobody-{number}", tenant_id=f"tenant-{number}", instance_id=f"instance-{number}")
        body = {
            "instance_id": f"x{number}",
            "model_name": f"posted-{number}",
            "events": [{"event_id": 1, "event_type": "cleared"}],
        }
        assert (await router.http.post("/events", json=body)).status_code == 200
    page = (await router.http.get("/metrics")).text
    for name in ("nobody-", "tenant-", "instance-", "posted-", "x1"):
        assert name not in page


async def test_unknown_paths_and_methods_get_problem_details(router: Router) -> None:
    for method, path, status, code in (
        ("GET", "/nothing", 404, "unknown_path"),
        ("GET", "/query", 405, "method_not_allowed"),
        ("DELETE", "/register", 405, "method_not_allowed"),
    ):
        answer = await router.http.request(method, path)
        assert answer.headers["content-type"] == "application/problem+json"
        body = answer.json()
        assert (answer.status_code, body["status"], body["code"]) == (status, status, code)


async def test_browsers_of_any_origin_are_let_in(router: Router) -> None:
    headers = {"origin": "http://console", "access-control-request-method": "POST"}
    assert (await router.http.options("/query", headers=headers)).headers["access-control-allow-origin"] == "*"
    assert (await router.query()).headers["access-control-allow-origin"] == "*"


async def test_a_query_is_one_debug_line_with_blocks_per_tier_and_times(router: Router) -> None:
    await router.register("a")
    await router.publish(stored(Worker("a", 0)))
    stream = io.StringIO()
    configure_logging("router", LoggingSettings(level="debug", format="json"), stream)
    await router.query()
    configure_logging("router", LoggingSettings(), io.StringIO())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (line,) = [line for line in lines if line["event"] == "query"]
    assert (line["npu_blocks"], line["cpu_blocks"], line["disk_blocks"], line["blocks"]) == (3, 0, 0, 3)
    assert 0 <= line["hash_us"] + line["match_us"] <= line["total_us"]
    assert "token" not in stream.getvalue()


def test_the_description_has_exactly_the_paths_that_are_served() -> None:
    api = RouterApi(Spaces(PlainIndex), Health("router"), RouterSettings())
    served = {route.path for route in api.routes}
    assert served - {"/docs", "/openapi.json"} == set(OPENAPI["paths"])


def test_a_router_without_nats_stops_at_once_when_told_to() -> None:
    port = free_port()
    environment = os.environ | {
        "KVROUTE_ROUTER__PORT": str(port),
        "KVROUTE_NATS__URL": f"nats://127.0.0.1:{free_port()}",
    }
    process = subprocess.Popen([sys.executable, "-m", "services.router"], env=environment, stderr=subprocess.PIPE)

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/livez", trust_env=False).status_code == 200
        return False

    try:
        wait_for(answers, "a router that listens")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.communicate()


async def test_po_10_a_router_that_is_stopped_leaves_a_snapshot_from_which_the_next_one_starts(
    nats_client: Client, nats_server: ServerProcess
) -> None:
    def restored() -> float:
        return REGISTRY.get_sample_value("kvroute_router_snapshots_total", {"outcome": "restored"}) or 0.0

    async with running(nats_server.url, nats_client) as first:
        await first.register("a")
        await first.publish(stored(Worker("a", 0)))
    before = restored()
    async with running(nats_server.url, nats_client) as second:
        assert restored() == before + 1
        assert (await second.instances())["a"]["longest_matched"] == 12
        assert "history" not in second.health.notes
    await nats_client.jetstream().purge_stream(INDEX_STREAM)
    async with running(nats_server.url, nats_client) as third:
        assert restored() == before + 2
        assert (await third.instances())["a"]["longest_matched"] == 12, "nothing is missing in the stream behind it"
