"""The shared runtime against real servers and real processes."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.client import Client
from starlette.applications import Starlette

from schemas.events import StateNote, decode_state_note
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord, dump_record
from services.runtime.broker import connect_nats, ensure_streams, masked
from services.runtime.health import Health, health_routes
from services.runtime.http_server import HttpServer
from services.runtime.logging import configure_logging
from services.runtime.metrics import REGISTRY
from services.runtime.registry_store import Registry, RegistryStore, RegistryWatch, key_of
from services.runtime.settings import LoggingSettings, NatsSettings
from services.runtime.taps import StateTap
from tests.conftest import ServerProcess, free_port, make_nats_server, wait_for


async def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "condition not reached"
        await asyncio.sleep(0.01)


def engine(instance_id: str, **changes: object) -> EngineRecord:
    return EngineRecord(instance_id=instance_id, model="m", block_size=4, generation=1, **changes)  # type: ignore[arg-type]


async def test_connecting_waits_for_a_server_that_comes_later_and_says_so(tmp_path: Path) -> None:
    server = make_nats_server(tmp_path)
    health = Health("test")
    connecting = asyncio.create_task(connect_nats(NatsSettings(url=server.url), "test", health))
    await until(lambda: "waiting for NATS" in str(health.report()))
    assert not health.ready
    await asyncio.to_thread(server.start)
    client = await asyncio.wait_for(connecting, 15)
    assert health.ready
    await client.close()
    server.stop()


async def test_streams_survive_being_ensured_twice_and_take_new_limits(nats_client: Client) -> None:
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings(stream_max_bytes=4 * 1024**2))
    await ensure_streams(js, NatsSettings(stream_max_bytes=8 * 1024**2, stream_max_age=60))
    info = await js.stream_info("KV_EVENTS")
    assert info.config.max_bytes == 8 * 1024**2
    assert info.config.subjects == ["kv.events.>"]
    assert (await js.stream_info("KV_INDEX")).config.max_age == 60


async def test_the_registry_watch_shows_the_initial_state_changes_and_removals(nats_client: Client) -> None:
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings())
    store = RegistryStore(js)
    await store.put(engine("a"))
    seen: list[Registry] = []
    watch = RegistryWatch(js, seen.append)
    await watch.start()
    assert set(watch.registry.engines) == {("a", 0)}
    revision = await store.put(PoolRecord(instance_id="p", model="m", block_size=4, endpoint="tcp://h:1"))
    assert await watch.wait_for_revision(revision)
    assert set(watch.registry.pools) == {"p"}
    tombstone = RetiredRecord(retired_kind="engine", instance_id="a", model="m", generation=9)
    assert await watch.wait_for_revision(await store.retire(tombstone))
    assert watch.registry.engines == {}
    assert watch.registry.retired == (tombstone,)
    await store.purge(key_of(tombstone))
    await until(lambda: watch.registry.retired == ())
    assert len(seen) == 4
    await watch.stop()


async def test_records_that_cannot_be_used_are_skipped_named_and_counted_once(
    nats_client: Client,
) -> None:
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings())
    store = RegistryStore(js)
    bucket = await store.bucket()
    good = json.loads(dump_record(engine("good")))
    bad = {
        "engine.nothing.0": (b'{"kind":"engine"}', "block_size: Field required"),
        "engine.text.0": (b"\xff\xfe", "body: "),
        "junk": (b"5", "body: "),
        "pool.null": (b"null", "body: "),
        "engine.size.0": (json.dumps(good | {"block_size": 0}).encode(), "block_size: Input should be greater"),
        "engine.rank.-1": (json.dumps(good | {"dp_rank": -1}).encode(), "dp_rank: Input should be greater"),
        "engine.long.0": (json.dumps(good | {"instance_id": "x" * 600}).encode(), "instance_id: String should have"),
        "engine.other.0": (json.dumps(good).encode(), "instance_id: belongs under the key engine.good.0"),
    }
    for key, (body, _) in bad.items():
        await bucket.put(key, body)
    before = counted_refusals()
    lines = io.StringIO()
    configure_logging("test", LoggingSettings(format="json"), lines)
    watch = RegistryWatch(js)
    await watch.start()
    assert await watch.wait_for_revision(await store.put(engine("good")))
    assert set(watch.registry.engines) == {("good", 0)}
    assert watch.registry.pools == {}
    assert counted_refusals() - before == len(bad)
    said = {line["key"]: line["problem"] for line in map(json.loads, lines.getvalue().splitlines())}
    for key, (_, problem) in bad.items():
        assert problem in said[key]
    assert await store.get("engine.other.0") == (None, 8)
    await watch.stop()


def counted_refusals() -> float:
    return REGISTRY.get_sample_value("kvroute_registry_refused_records_total") or 0.0


async def test_a_change_that_its_listener_cannot_handle_does_not_end_the_watch(nats_client: Client) -> None:
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings())
    store = RegistryStore(js)

    def refuse(registry: Registry) -> None:
        raise KeyError("no such thing")

    watch = RegistryWatch(js, refuse)
    await watch.start()
    for name in ("a", "b"):
        assert await watch.wait_for_revision(await store.put(engine(name)))
    assert set(watch.registry.engines) == {("a", 0), ("b", 0)}
    await watch.stop()


async def test_na_01_the_watch_lists_everything_again_after_the_server_was_killed(tmp_path: Path) -> None:
    server = make_nats_server(tmp_path)
    server.start()
    settings = NatsSettings(url=server.url)
    client = await connect_nats(settings, "watcher")
    js = client.jetstream()
    await ensure_streams(js, settings)
    store = RegistryStore(js)
    await store.put(engine("a"))
    await store.put(engine("b"))
    watch = RegistryWatch(js)
    await watch.start()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    other = await nats.connect(server.url)
    other_store = RegistryStore(other.jetstream())
    await other_store.purge("engine.a.0")
    await other_store.put(engine("c"))
    await until(lambda: set(watch.registry.engines) == {("b", 0), ("c", 0)}, 20)
    await watch.stop()
    await other.close()
    await client.close()
    server.stop()


async def test_taps_publish_notes_and_skip_what_exceeds_the_rate(nats_client: Client) -> None:
    received: list[StateNote] = []

    async def receive(message: object) -> None:
        received.append(decode_state_note(message.data))  # type: ignore[attr-defined]

    await nats_client.subscribe("kv.state.matched.*", cb=receive)
    await nats_client.flush()
    tap = StateTap(nats_client, "test", max_per_second=5)
    for number in range(50):
        tap.note(StateNote(state="matched", model="a.b", blocks=number))
    await tap.stop()
    await nats_client.flush()
    await until(lambda: len(received) >= 5)
    assert len(received) == 5
    assert received[0] == StateNote(state="matched", model="a.b", blocks=0)


async def test_health_routes_tell_liveness_readiness_and_reasons() -> None:
    health = Health("test")
    health.set("redis", False, "Redis is away")
    server = HttpServer(Starlette(routes=health_routes(health)), "::", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.get("/livez")).status_code == 200
        not_ready = await client.get("/readyz")
        assert not_ready.status_code == 503
        assert not_ready.json()["conditions"]["redis"]["reason"] == "Redis is away"
        health.set("redis", True)
        assert (await client.get("/readyz")).json()["ready"] is True
        assert "process_cpu_seconds_total" in (await client.get("/metrics")).text
    await server.stop()


async def test_an_occupied_port_is_named_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}"):
            await HttpServer(Starlette(), "127.0.0.1", port).start()


STREAMING_SERVICE = """
import asyncio, contextlib, sys
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from services.runtime.http_server import HttpServer
from services.runtime.service import run_service

async def stream(request):
    async def body():
        while True:
            yield b"data: x"
            await asyncio.sleep(3600)
    return StreamingResponse(body(), media_type="text/event-stream")

async def poll(request):
    await asyncio.sleep(3600)
    return Response("late")

@contextlib.asynccontextmanager
async def start(config, health):
    server = HttpServer(Starlette(routes=[Route("/stream", stream), Route("/poll", poll)]), "127.0.0.1", 0)
    await server.start()
    print(server.port, flush=True)
    try:
        yield
    finally:
        await server.stop(0.3)
        print("flushed", flush=True)

sys.exit(run_service("router", start, []))
"""


def test_ht_01_open_streams_and_long_polls_keep_no_process_alive_and_leave_no_trace() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STREAMING_SERVICE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for client, path in zip(clients, ("/stream", "/poll", None), strict=True):
        if path is not None:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert b"200 OK" in clients[0].recv(1000)
    before = time.monotonic()
    process.terminate()
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert time.monotonic() - before < 5
    assert output == "flushed\n"
    assert "Traceback" not in errors
    assert "CancelledError" not in errors
    for client in clients:
        client.close()


SERVICE = """
import asyncio, contextlib, sys
from services.runtime.service import run_service

@contextlib.asynccontextmanager
async def start(config, health):
    print("up", flush=True)
    try:
        yield
    finally:
        await asyncio.sleep(float(sys.argv[1]))
        print("flushed", flush=True)

sys.exit(run_service("router", start, []))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_stops_on_a_signal_finishes_its_work_and_exits_0(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVICE, "0.05"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert process.wait(timeout=10) == 0
    assert process.stdout.read() == "flushed\n"


def test_a_service_that_hangs_while_stopping_is_cut_off_after_its_grace_time() -> None:
    environment = os.environ | {"KVROUTE_RUNTIME__SHUTDOWN_GRACE": "0.3"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, "60"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    before = time.monotonic()
    process.terminate()
    assert process.wait(timeout=10) == 0
    assert time.monotonic() - before < 5
    assert process.stdout.read() == ""


def test_a_wrong_configuration_exits_2_and_names_the_key() -> None:
    environment = os.environ | {"KVROUTE_ROUTER__PROT": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SERVICE, "0"], capture_output=True, text=True, env=environment, timeout=30, check=False
    )
    assert result.returncode == 2
    assert "unknown key router.prot" in result.stderr


def test_passwords_in_urls_are_masked() -> None:
    assert masked("nats://user:s3cret@host:4222") == "nats://***@host:4222"
    assert masked("nats://host:4222") == "nats://host:4222"


def test_free_ports_and_servers_of_the_fixtures_are_usable(
    nats_server: ServerProcess, redis_server: ServerProcess
) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", redis_server.port))) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(16) == b"+PONG\r\n"
    assert nats_server.process is not None
    wait_for(lambda: free_port() > 0, "free port")
