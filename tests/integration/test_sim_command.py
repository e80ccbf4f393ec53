"""``kvroute sim engine|metaservice`` as processes: they register themselves, serve, and say goodbye on SIGTERM."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.runtime.http_server import HttpServer

DEADLINE_SECONDS = 20.0
ROOT = Path(__file__).parents[2]


class RecordingRouter:
    """Takes registrations as the router does and remembers them."""

    def __init__(self, port: int = 0) -> None:
        self.calls: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.answer = 201
        routes = [Route(path, self._record, methods=["POST"]) for path in ("/register", "/unregister")]
        self.server = HttpServer(Starlette(routes=routes), "127.0.0.1", port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def next(self) -> tuple[str, dict[str, Any]]:
        return await asyncio.wait_for(self.calls.get(), DEADLINE_SECONDS)

    async def _record(self, request: Request) -> Response:
        self.calls.put_nowait((request.url.path, await request.json()))
        if request.url.path == "/unregister":
            return JSONResponse({"status": "ok"})
        return JSONResponse({"error": "block_size: must not be 0"}, self.answer)


@pytest.fixture
async def router() -> AsyncIterator[RecordingRouter]:
    router = RecordingRouter()
    await router.server.start()
    yield router
    await router.server.stop(grace=1.0)


STARTED: list[asyncio.subprocess.Process] = []


@pytest.fixture(autouse=True)
async def nothing_stays() -> AsyncIterator[None]:
    """A test that fails half-way leaves no process behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from kvroute.commands.sim import app; app()"),
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    STARTED.append(process)
    return process


async def exit_code(process: asyncio.subprocess.Process) -> int:
    return await asyncio.wait_for(process.wait(), DEADLINE_SECONDS)


async def test_an_engine_registers_every_rank_and_unregisters_on_sigterm(router: RecordingRouter) -> None:
    engine = await start(
        *("engine", "--name", "e1", "--model", "m", "--block-size", "16", "--dp-size", "2", "--port", "0"),
        *("--events-port", "0", "--replay-port", "0", "--router", router.url),
    )
    bodies = [await router.next() for _ in range(2)]
    assert [(path, body["instance_id"], body["dp_rank"], body["block_size"]) for path, body in bodies] == [
        ("/register", "e1", 0, 16),
        ("/register", "e1", 1, 16),
    ]
    endpoints = {body["medium_endpoints"]["npu"] for _, body in bodies} | {
        body["replay_endpoint"] for _, body in bodies
    }
    assert len(endpoints) == 4
    engine.send_signal(signal.SIGTERM)
    assert [(path, body["dp_rank"]) for path, body in [await router.next() for _ in range(2)]] == [
        ("/unregister", 0),
        ("/unregister", 1),
    ]
    assert await exit_code(engine) == 0


async def test_a_metaservice_registers_as_a_pool(router: RecordingRouter) -> None:
    pool = await start("metaservice", "--model", "m", "--port", "0", "--events-port", "0", "--router", router.url)
    path, body = await router.next()
    assert (path, body["instance_id"], body["store_backend"]) == ("/register", "memcache-pool", "Memcache")
    assert body["endpoint"].startswith("tcp://127.0.0.1:")
    assert "medium_endpoints" not in body
    pool.send_signal(signal.SIGINT)
    assert (await router.next())[0] == "/unregister"
    assert await exit_code(pool) == 0


async def test_an_engine_waits_for_a_router_that_starts_later_and_says_so(router: RecordingRouter) -> None:
    port = router.server.port
    await router.server.stop(grace=1.0)
    engine = await start(
        "engine", "--port", "0", "--events-port", "0", "--replay-port", "0", "--router", f"http://127.0.0.1:{port}"
    )
    assert engine.stderr is not None
    while b"waiting for the router" not in (await asyncio.wait_for(engine.stderr.readline(), DEADLINE_SECONDS)):
        pass
    late = RecordingRouter(port)
    await late.server.start()
    assert (await late.next())[0] == "/register"
    engine.send_signal(signal.SIGTERM)
    assert (await late.next())[0] == "/unregister"
    assert await exit_code(engine) == 0
    await late.server.stop(grace=1.0)


async def test_a_refused_registration_ends_the_engine_with_the_routers_words(router: RecordingRouter) -> None:
    router.answer = 422
    engine = await start("engine", "--port", "0", "--events-port", "0", "--replay-port", "0", "--router", router.url)
    _, error = await asyncio.wait_for(engine.communicate(), DEADLINE_SECONDS)
    assert engine.returncode == 1
    assert b"block_size: must not be 0" in error


async def test_a_taken_port_is_named(router: RecordingRouter) -> None:
    engine = await start("engine", "--port", str(router.server.port), "--events-port", "0", "--replay-port", "0")
    _, error = await asyncio.wait_for(engine.communicate(), DEADLINE_SECONDS)
    assert engine.returncode == 1
    assert str(router.server.port).encode() in error


@pytest.mark.parametrize("option", ["--port", "--events-port"])
def test_an_occupied_port_is_named_with_what_to_do(option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ports = {"--port": "0", "--events-port": "0", "--replay-port": "0"} | {option: port}
        result = subprocess.run(
            [sys.executable, "-m", "kvroute", "sim", "engine", *(text for pair in ports.items() for text in pair)],
            capture_output=True, text=True, timeout=30, check=False, cwd=ROOT,
        )  # fmt: skip
    assert result.returncode == 1
    said = result.stdout + result.stderr
    assert port in said
    assert "already in use" in said
    assert said.endswith("port 0 takes a free one\n")
    assert "Traceback" not in said
