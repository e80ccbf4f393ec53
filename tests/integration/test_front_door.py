"""The front door with simulated engines, a stand-in router and engines that misbehave."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgpack
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvroute.sim.engine import EngineSettings, SimulatedEngine
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.engine_requests import tokenize
from kvroute.sim.timing import Speed
from schemas.registry import EngineRecord
from services.coordinator.frontdoor.load import LoadAccount
from services.coordinator.frontdoor.routes import engine_client, front_door_routes
from services.coordinator.frontdoor.settings import FrontDoorSettings
from services.runtime.health import Health
from services.runtime.http_server import HttpServer
from services.runtime.registry_store import Registry

FAST = Speed(prefill=1e9, overhead=0.0, per_output_token=0.0)


class Router:
    """Answers /query with what a test says each worker has cached, and keeps what it was asked."""

    def __init__(self) -> None:
        self.matched: dict[str, dict[str, int]] = {}
        self.asked: list[dict[str, Any]] = []
        self.delay = 0.0

    async def query(self, request: Request) -> Response:
        self.asked.append(msgpack.unpackb(await request.body()))
        await asyncio.sleep(self.delay)
        instances = {
            name: {"DP": {rank: {"matched_tokens": tokens} for rank, tokens in ranks.items()}}
            for name, ranks in self.matched.items()
        }
        return Response(msgpack.packb({"default": instances}), media_type="application/msgpack")


class Faulty:
    """An engine that behaves as a test says; `open` counts the requests it is working on."""

    def __init__(self) -> None:
        self.open = 0
        self.seen = 0
        self.behaviour: Callable[[Receive, Send], Awaitable[None]] = self.hang

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.open += 1
        self.seen += 1
        try:
            while (await receive()).get("more_body"):
                pass
            await self.behaviour(receive, send)
        finally:
            self.open -= 1

    async def hang(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def stream_then_hang(self, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await self.hang(receive, send)

    async def break_off(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ConnectionAbortedError

    async def break_before_the_first_byte(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        raise ConnectionAbortedError

    def answer(self, status: int) -> Callable[[Receive, Send], Awaitable[None]]:
        async def behave(receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": status, "headers": [(b"x-engine", b"yes")]})
            await send({"type": "http.response.body", "body": b"{}"})

        return behave


class Place:
    """The front door on a real port, two simulated engines `a` (ranks 0, 1) and `b`, a faulty one `f` on demand."""

    def __init__(self) -> None:
        self.registry: Registry | None = Registry()
        self.router = Router()
        self.faulty = Faulty()
        self.load = LoadAccount()
        self.engines: list[SimulatedEngine] = []
        self.faulty_url = ""
        self.router_url = ""

    def register(self, instance_id: str, url: str, ranks: int = 1, **more: Any) -> None:
        assert self.registry is not None
        engines = dict(self.registry.engines)
        for rank in range(ranks):
            engines[instance_id, rank] = EngineRecord(
                instance_id=instance_id, model="m", block_size=4, dp_rank=rank, url=url, **more
            )
        self.registry = Registry(engines)

    def only_faulty(self) -> None:
        self.registry = Registry()
        self.register("f", self.faulty_url)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "condition not reached"
            await asyncio.sleep(0.01)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    router = HttpServer(Starlette(routes=[Route("/query", place.router.query, methods=["POST"])]), "127.0.0.1", 0)
    faulty = HttpServer(place.faulty, "127.0.0.1", 0)
    await router.start()
    await faulty.start()
    place.router_url = f"http://127.0.0.1:{router.port}"
    place.faulty_url = f"http://127.0.0.1:{faulty.port}"
    for name, ranks in (("a", 2), ("b", 1)):
        engine = SimulatedEngine(EngineSettings(name, "m", RankSpec(4, 64), dp_size=ranks, speed=FAST))
        await engine.start()
        place.engines.append(engine)
        place.register(name, engine.url, ranks)
    yield place
    for engine in place.engines:
        await engine.stop()
    await router.stop(0.2)
    await faulty.stop(0.2)


@pytest.fixture
async def http(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    settings = FrontDoorSettings(router_url=place.router_url, query_timeout=0.5, first_byte_timeout=2, attempts=3)
    async with engine_client(settings) as client:
        routes = front_door_routes(lambda: place.registry, client, place.load, settings, Health("coordinator"))
        server = HttpServer(Starlette(routes=routes), "127.0.0.1", 0)
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as caller:
            yield caller
        await server.stop(0.5)


def completion(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 2, **more}


async def test_the_models_are_those_of_the_registry(place: Place, http: httpx.AsyncClient) -> None:
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["m"]
    place.registry = None
    assert (await http.get("/v1/models")).status_code == 503
    assert (await http.post("/v1/completions", json=completion([1]))).status_code == 503


async def test_a_prompt_goes_where_the_router_says_its_prefix_is_to_the_rank_that_has_it(
    place: Place, http: httpx.AsyncClient
) -> None:
    place.router.matched = {"a": {"0": 0, "1": 8}, "b": {"0": 4}}
    answer = await http.post("/v1/completions", json=completion(list(range(9)), cache_salt="s"))
    assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")
    placed = (answer.headers["x-kvroute-instance"], answer.headers["x-kvroute-dp-rank"])
    assert placed == ("a", "1")
    assert answer.headers["x-kvroute-matched-tokens"] == "8"
    (asked,) = place.router.asked
    assert asked == {
        "model": "m",
        "tenant_id": "default",
        "block_size": 4,
        "cache_salt": "s",
        "token_ids": b"".join(token.to_bytes(4, "little") for token in range(9)),
    }


async def test_text_and_chat_are_tokenised_by_an_engine(place: Place, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=completion("hello world"))
    messages = [{"role": "user", "content": "hello"}]
    answer = await http.post("/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 1})
    assert answer.json()["object"] == "chat.completion"
    texts = [bytes(asked["token_ids"][::4]).decode() for asked in place.router.asked]
    assert texts == ["hello world", "<|user|>hello<|assistant|>"]
    answer = await http.post("/tokenize", json={"model": "m", "prompt": "abc"})
    assert answer.json()["tokens"] == tokenize("abc")


async def test_a_stream_is_passed_on_as_it_comes(place: Place, http: httpx.AsyncClient) -> None:
    place.only_faulty()
    place.faulty.behaviour = place.faulty.stream_then_hang
    async with http.stream("POST", "/v1/completions", json=completion([1] * 8, stream=True)) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert await anext(answer.aiter_bytes()) == b"data: 1\n\n"
        assert place.load.total == 1
    await place.until(lambda: place.load.total == 0)


async def test_a_whole_stream_arrives_with_its_end_mark(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=completion([1] * 8, stream=True))
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("fault", ["refused", "503", "break_before_the_first_byte", "hang"])
async def test_an_engine_that_fails_before_its_first_byte_is_replaced_by_another(
    place: Place, http: httpx.AsyncClient, fault: str
) -> None:
    url = place.faulty_url
    if fault == "503":
        place.faulty.behaviour = place.faulty.answer(503)
    elif fault == "refused":
        url = "http://127.0.0.1:1"
    else:
        place.faulty.behaviour = getattr(place.faulty, fault)
    place.register("f", url)
    place.router.matched = {"f": {"0": 8}}
    answer = await http.post("/v1/completions", json=completion(list(range(9))))
    assert (answer.status_code, answer.headers["x-kvroute-instance"]) in ((200, "a"), (200, "b"))
    assert place.load.total == 0


async def test_when_every_engine_fails_the_answer_is_502_and_says_why(place: Place, http: httpx.AsyncClient) -> None:
    place.only_faulty()
    place.faulty.behaviour = place.faulty.answer(503)
    answer = await http.post("/v1/completions", json=completion([1]))
    assert answer.status_code == 502
    assert "answered 503" in answer.json()["error"]["message"]
    assert place.faulty.seen == 1


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_an_engines_own_answer_is_passed_on_without_a_retry(
    place: Place, http: httpx.AsyncClient, status: int
) -> None:
    place.only_faulty()
    place.faulty.behaviour = place.faulty.answer(status)
    answer = await http.post("/v1/completions", json=completion([1]))
    assert (answer.status_code, answer.headers["x-engine"], place.faulty.seen) == (status, "yes", 1)


async def test_an_answer_that_breaks_off_breaks_off_for_the_caller_too(place: Place, http: httpx.AsyncClient) -> None:
    place.only_faulty()
    place.faulty.behaviour = place.faulty.break_off
    with pytest.raises(httpx.HTTPError):
        await http.post("/v1/completions", json=completion([1]))
    await place.until(lambda: place.load.total == 0)


@pytest.mark.parametrize("behaviour", ["hang", "stream_then_hang"])
async def test_t36_a_caller_that_leaves_frees_the_engine_and_the_load_account(
    place: Place, http: httpx.AsyncClient, behaviour: str
) -> None:
    place.only_faulty()
    place.faulty.behaviour = getattr(place.faulty, behaviour)
    calls = [asyncio.create_task(http.post("/v1/completions", json=completion([1], stream=True))) for _ in range(20)]
    await place.until(lambda: place.load.total == 20)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await place.until(lambda: place.load.total == 0)
    await place.until(lambda: place.faulty.open == 0)


async def test_a_router_that_fails_or_is_slow_costs_the_affinity_and_nothing_else(
    place: Place, http: httpx.AsyncClient
) -> None:
    place.router.delay = 30
    before = time.monotonic()
    answer = await http.post("/v1/completions", json=completion(list(range(9))))
    assert (answer.status_code, answer.headers["x-kvroute-matched-tokens"]) == (200, "0")
    assert time.monotonic() - before < 5


async def test_a_prompt_shorter_than_a_block_is_not_asked_for(place: Place, http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/completions", json=completion([1, 2, 3]))).status_code == 200
    assert place.router.asked == []


async def test_an_unknown_model_is_404_and_a_bad_body_400_and_a_large_one_413(
    place: Place, http: httpx.AsyncClient
) -> None:
    assert (await http.post("/v1/completions", json={"model": "x", "prompt": "y"})).status_code == 404
    assert (await http.post("/v1/completions", content=b"{")).status_code == 400
    assert (await http.post("/v1/completions", content=b" " * (16 * 1024 * 1024 + 1))).status_code == 413
    answer = await http.post("/v1/chat/completions", json={"model": "m"})
    assert "messages" in answer.json()["error"]["message"]


async def test_parallel_requests_spread_as_load_is_charged_when_deciding(place: Place, http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(http.post("/v1/completions", json=completion([7] * 12)) for _ in range(30)))
    assert {answer.status_code for answer in answers} == {200}
    workers = {(answer.headers["x-kvroute-instance"], answer.headers["x-kvroute-dp-rank"]) for answer in answers}
    assert len(workers) == 3
    assert place.load.total == 0
