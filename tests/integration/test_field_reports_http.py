"""Faults reported from the field around HTTP: connections that die, callers that leave, halves of requests."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from schemas.registry import EngineRecord
from services.coordinator.frontdoor import routes
from services.coordinator.frontdoor.load import LoadAccount
from services.coordinator.frontdoor.routes import OPENAI_HANDLERS, engine_client, front_door_routes
from services.coordinator.frontdoor.settings import FrontDoorSettings
from services.runtime.health import Health, health_routes
from services.runtime.http_server import HttpServer
from services.runtime.metrics import REGISTRY
from services.runtime.problems import PROBLEM_HANDLERS
from services.runtime.registration_routes import registration_routes
from services.runtime.registry_store import Registry

COMPLETION = {"model": "m", "prompt": [1, 2], "max_tokens": 1}


class Door:
    """A front door on a real port with one engine behind it."""

    def __init__(self, engine_url: str) -> None:
        record = EngineRecord(instance_id="e", model="m", block_size=4, url=engine_url)
        self.registry = Registry({("e", 0): record})
        self.load = LoadAccount()
        self.engines = engine_client(FrontDoorSettings(attempts=1, first_byte_timeout=20))
        self.url = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[httpx.AsyncClient]:
        settings = FrontDoorSettings(attempts=1, first_byte_timeout=20)
        async with self.engines:
            listed = front_door_routes(lambda: self.registry, self.engines, self.load, settings, Health("coordinator"))
            server = HttpServer(Starlette(routes=listed, exception_handlers=OPENAI_HANDLERS), "127.0.0.1", 0)
            await server.start()
            limits = httpx.Limits(max_connections=None)
            base = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=base, trust_env=False, limits=limits, timeout=20) as caller:
                yield caller
            await server.stop(0.5)


async def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "condition not reached"
        await asyncio.sleep(0.01)


async def test_ht_02_cancelled_calls_give_their_connections_back() -> None:
    working = 0
    finish = asyncio.Event()

    async def slow(request: Request) -> Response:
        nonlocal working
        working += 1
        try:
            await finish.wait()
        finally:
            working -= 1
        return Response(b"{}")

    engine = HttpServer(Starlette(routes=[Route("/v1/completions", slow, methods=["POST"])]), "127.0.0.1", 0)
    await engine.start()
    door = Door(f"http://127.0.0.1:{engine.port}")
    async with door.open() as caller:
        calls = [asyncio.create_task(caller.post("/v1/completions", json=COMPLETION)) for _ in range(500)]
        await until(lambda: working == 500)
        for call in calls[::2]:
            call.cancel()
        await until(lambda: door.load.total == 250)
        finish.set()
        answers = await asyncio.gather(*calls[1::2])
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: door.load.total == 0)
        before = time.monotonic()
        assert (await caller.post("/v1/completions", json=COMPLETION)).status_code == 200
        assert time.monotonic() - before < 2.0
    await engine.stop(0.2)


async def test_ht_03_a_connection_that_the_engine_is_about_to_close_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine here drops a request that comes on a connection idle for longer than 0.3 s, as in the race between
    its closing and the next request."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        answered = 0.0
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line
                )
                await reader.readexactly(length)
                if answered and time.monotonic() - answered > 0.3:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                answered = time.monotonic()
        writer.close()

    monkeypatch.setattr(routes, "IDLE_SECONDS", 0.2)
    engine = await asyncio.start_server(serve, "127.0.0.1", 0)
    door = Door(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}")
    async with door.open() as caller:
        for pause in (0.0, 0.0, 0.35, 0.0, 0.35):
            await asyncio.sleep(pause)
            assert (await caller.post("/v1/completions", json=COMPLETION)).status_code == 200
    assert connections == 3
    engine.close()


def test_ht_03_idle_connections_are_given_up_before_vllm_closes_them() -> None:
    assert routes.IDLE_SECONDS < 5


def slow_requests() -> float:
    return REGISTRY.get_sample_value("kvroute_http_slow_requests_total") or 0.0


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /regi",
        b"POST /register HTTP/1.1\r\nhost: x\r\n",
        b"POST /register HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n",
        b'POST /register HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"instance_id"',
        b"POST /register HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{}",
        b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nPOST /register HTTP/1.1\r\n",
    ],
)
async def test_ht_01_half_a_request_is_cut_off_after_a_while_and_counted(sent: bytes) -> None:
    app = Starlette(routes=[*registration_routes(lambda: None), *health_routes(Health("test"))])
    server = HttpServer(app, "127.0.0.1", 0, receive_timeout=0.2)
    await server.start()
    before = slow_requests()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 5)
    assert slow_requests() - before == 1
    writer.close()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as caller:
        assert (await caller.get("/livez")).status_code == 200
        await asyncio.sleep(0.3)  # an idle connection that owes nothing is no slow request
        assert (await caller.get("/livez")).status_code == 200
    assert slow_requests() - before == 1
    await server.stop(0.2)


async def test_a_slow_answer_is_not_taken_for_a_slow_request() -> None:
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.4)
        return Response(b"late")

    server = HttpServer(Starlette(routes=[Route("/", slow, methods=["POST"])]), "127.0.0.1", 0, receive_timeout=0.2)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as caller:
        assert (await caller.post("/", content=b"body")).text == "late"
    await server.stop(0.2)


async def test_what_no_route_answers_for_is_a_problem_with_a_code() -> None:
    async def fails(request: Request) -> Response:
        raise RuntimeError("a fault of ours")

    app = Starlette(routes=[Route("/fails", fails)], exception_handlers=PROBLEM_HANDLERS)
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as caller:
        for method, path, status, code in (
            ("GET", "/nothing", 404, "unknown_path"),
            ("POST", "/fails", 405, "method_not_allowed"),
            ("GET", "/fails", 500, "internal_error"),
        ):
            answer = await caller.request(method, path)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert answer.headers["content-type"] == "application/problem+json"
            assert "a fault of ours" not in answer.text
    await server.stop(0.2)


async def test_unknown_paths_of_the_front_door_are_errors_as_openai_clients_read_them() -> None:
    async with Door("http://127.0.0.1:1").open() as caller:
        answer = await caller.post("/v1/embeddings", json={})
        assert answer.status_code == 404
        assert "/v1/embeddings is not served" in answer.json()["error"]["message"]
        assert (await caller.get("/v1/completions")).json()["error"]["code"] == 405


def calls(route: str, outcome: str) -> float:
    labels = {"route": route, "outcome": outcome}
    return REGISTRY.get_sample_value("kvroute_registration_requests_total", labels) or 0.0


async def test_ht_04_calls_of_the_registration_api_are_counted_by_outcome() -> None:
    server = HttpServer(Starlette(routes=registration_routes(lambda: None)), "127.0.0.1", 0)
    await server.start()
    wanted = {"unreadable": b"{", "too_large": b" " * 1_100_000, "unavailable": b"{}"}
    before = {outcome: calls("/register", outcome) for outcome in wanted}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as caller:
        for body in wanted.values():
            await caller.post("/register", content=body)
    assert {outcome: calls("/register", outcome) - before[outcome] for outcome in wanted} == dict.fromkeys(wanted, 1)
    await server.stop(0.2)
