"""One request through the front door: place it, send it on, hand the answer back as it comes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.coordinator.frontdoor import metrics
from services.coordinator.frontdoor.choice import Target, choose, targets_for
from services.coordinator.frontdoor.load import LoadAccount
from services.coordinator.frontdoor.prefix import PrefixLookup
from services.coordinator.frontdoor.prompts import Prompt, RequestRefusedError, read_prompt
from services.coordinator.frontdoor.settings import FrontDoorSettings
from services.runtime.logging import get_logger
from services.runtime.registry_store import Registry

RANK_HEADER = "X-data-parallel-rank"
TENANT_HEADER = "x-kvroute-tenant"
RETRY_STATUS = (502, 503, 504)
_NOT_FORWARDED = frozenset(
    (
        *("host", "content-length", "connection", "keep-alive", "proxy-connection", "transfer-encoding", "te"),
        *("trailer", "upgrade", "expect", RANK_HEADER.lower(), TENANT_HEADER),
    )
)  # fmt: skip

log = get_logger("front_door")


class EngineFailedError(Exception):
    """An engine failed before the first byte of its answer; another one may be tried."""


class _Refusal(Exception):  # noqa: N818 - an answer, not a fault
    def __init__(self, status: int, message: str, outcome: str) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome


class Relay:
    """An ASGI endpoint for one route. A client that goes away cancels the engine's request and frees its charge."""

    def __init__(
        self,
        path: str,
        registry: Callable[[], Registry | None],
        client: httpx.AsyncClient,
        lookup: PrefixLookup,
        load: LoadAccount,
        settings: FrontDoorSettings,
    ) -> None:
        self._path = path
        self._registry = registry
        self._client = client
        self._lookup = lookup
        self._load = load
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        request = Request(scope, receive)
        outcome = "client_gone"
        try:
            body = await self._body(request)
            working = asyncio.create_task(self._serve(request, body, send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    outcome = await working
            finally:
                for task in (working, leaving):
                    task.cancel()
                await asyncio.gather(working, leaving, return_exceptions=True)
        except ClientDisconnect:
            pass
        except _Refusal as refusal:
            outcome = refusal.outcome
            await _answer_error(send, refusal.status, str(refusal))
        except httpx.HTTPError as error:
            # The answer has begun: cutting the connection is the one way left to say that it is not complete.
            outcome = "broken"
            log.warning("answer_broken", error=str(error) or type(error).__name__)
            raise ConnectionAbortedError("the engine broke off its answer") from error
        finally:
            metrics.REQUESTS.labels(self._path, outcome).inc()

    async def _body(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._settings.max_body_bytes:
                limit = self._settings.max_body_bytes
                raise _Refusal(413, f"the body is larger than {limit} bytes", "refused")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _serve(self, request: Request, body: bytes, send: Send) -> str:
        started = time.perf_counter()
        try:
            prompt = read_prompt(body, self._path)
        except RequestRefusedError as error:
            raise _Refusal(400, str(error), "refused") from None
        tenant = request.headers.get(TENANT_HEADER, "default")
        targets = self._targets(prompt, tenant)
        matched = await self._lookup.matched_tokens(prompt, targets, tenant)
        metrics.PLACING_SECONDS.observe(time.perf_counter() - started)
        failures: list[str] = []
        tried: set[Any] = set()
        while len(tried) < self._settings.attempts:
            target = choose(targets, matched, self._load, self._settings.tokens_per_request, tried)
            if target is None:
                break
            tried.add(target.worker)
            with self._load.charge(target.worker):
                try:
                    status = await self._forward(request, body, target, matched.get(target.worker, 0), send)
                    return "answered" if status < httpx.codes.BAD_REQUEST else "refused_by_engine"
                except EngineFailedError as error:
                    failures.append(f"{target.worker.instance_id}: {error}")
            log.warning("engine_failed", instance_id=target.worker.instance_id, error=failures[-1])
            metrics.ATTEMPTS.inc()
        raise _Refusal(502, f"no engine answered: {'; '.join(failures)}", "engines_failed")

    def _targets(self, prompt: Prompt, tenant: str) -> list[Target]:
        registry = self._registry()
        if registry is None:
            raise _Refusal(503, "starting: the registry is not reached yet", "starting")
        targets = targets_for(registry, prompt.model, tenant)
        if not targets:
            raise _Refusal(404, f"no engine with a url serves the model {prompt.model[:200]!r}", "no_engine")
        return targets

    async def _forward(self, request: Request, body: bytes, target: Target, matched: int, send: Send) -> int:
        headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_FORWARDED]
        if target.rank_header:
            headers.append((RANK_HEADER, str(target.worker.dp_rank)))
        async with self._answer(f"{target.url}{self._path}", body, headers) as (response, first, rest):
            metrics.MATCHED_TOKENS.inc(matched)
            placed = [
                (b"x-kvroute-instance", target.worker.instance_id.encode("utf-8", "replace")),
                (b"x-kvroute-dp-rank", str(target.worker.dp_rank).encode()),
                (b"x-kvroute-matched-tokens", str(matched).encode()),
            ]
            kept = [(name, value) for name, value in response.headers.raw if name.lower().decode() not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept + placed})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return response.status_code

    @asynccontextmanager
    async def _answer(
        self, url: str, body: bytes, headers: list[tuple[str, str]]
    ) -> AsyncIterator[tuple[httpx.Response, bytes, AsyncIterator[bytes]]]:
        """An engine's answer with its first bytes at hand. Raises EngineFailedError when none come."""
        response: httpx.Response | None = None
        try:
            try:
                async with asyncio.timeout(self._settings.first_byte_timeout):
                    outgoing = self._client.build_request("POST", url, content=body, headers=headers)
                    response = await self._client.send(outgoing, stream=True)
                    if response.status_code in RETRY_STATUS:
                        raise EngineFailedError(f"answered {response.status_code}")
                    rest = response.aiter_raw()
                    first = await anext(rest, b"")
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                raise EngineFailedError(str(error) or type(error).__name__) from error
            yield response, first, rest
        finally:
            if response is not None:
                with suppress(httpx.HTTPError):
                    await response.aclose()


_HOP_BY_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "trailer", "upgrade", "server", "date"))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_error(send: Send, status: int, message: str) -> None:
    kind = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError"}.get(status, "InternalServerError")
    body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
