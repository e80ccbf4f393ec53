"""``POST /register`` and ``POST /unregister`` as routes that the router and the coordinator both mount."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import msgspec
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from services.runtime.bounded_bodies import TooComplexError, check_json, read_msgpack
from services.runtime.metrics import counter
from services.runtime.registrar import Registrar
from services.runtime.registration_answers import Answer, starting

MAX_BODY_BYTES = 1024 * 1024
OUTCOMES = {400: "unreadable", 404: "unknown", 409: "conflict", 413: "too_large", 422: "refused", 503: "unavailable"}

REQUESTS = counter("kvroute_registration_requests_total", "Calls of the registration API", ("route", "outcome"))

MSGPACK_TYPES = frozenset(("application/msgpack", "application/x-msgpack"))


class BodyRefusedError(Exception):
    """A body that cannot be read at all; carries the answer."""

    def __init__(self, status: int, error: str, code: str) -> None:
        super().__init__(error)
        self.answer = Answer(status, {"error": error, "code": code})


def registration_routes(registrar: Registrar | Callable[[], Registrar | None]) -> list[Route]:
    """The two routes; JSON or msgpack in, the same out.

    registrar: may be a function that has none yet (the process still waits for NATS): answered 503 meanwhile.
    """

    async def register(body: object) -> Answer:
        found = registrar() if callable(registrar) else registrar
        return await found.register(body) if found is not None else starting()

    async def unregister(body: object) -> Answer:
        found = registrar() if callable(registrar) else registrar
        return await found.unregister(body) if found is not None else starting()

    return [
        Route("/register", _endpoint("/register", register), methods=["POST"]),
        Route("/unregister", _endpoint("/unregister", unregister), methods=["POST"]),
    ]


async def read_object(request: Request, limit: int = MAX_BODY_BYTES) -> Any:
    """The decoded body. Raises BodyRefusedError: 413 above `limit` bytes, 400 for what is neither JSON nor msgpack."""
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise BodyRefusedError(413, f"the body is larger than {limit} bytes", "body_too_large")
            chunks.append(chunk)
    except ClientDisconnect:
        raise BodyRefusedError(400, "the client went away before its body was complete", "incomplete_body") from None
    body = b"".join(chunks)
    try:
        if speaks_msgpack(request):
            return read_msgpack(body)
        check_json(body)
        return orjson.loads(body)
    except TooComplexError as error:
        raise BodyRefusedError(413, f"invalid request body: {error}", "body_too_complex") from error
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        form = "msgpack" if speaks_msgpack(request) else "JSON"
        raise BodyRefusedError(400, f"invalid {form} request body: {error}", "invalid_body") from error


def speaks_msgpack(request: Request) -> bool:
    """Whether the request is in msgpack, and so the answer."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower() in MSGPACK_TYPES


def counted(route: str, answer: Answer) -> Answer:
    """The same answer, counted by what it amounts to. route: as in the routing table, never a caller's text."""
    REQUESTS.labels(route, OUTCOMES.get(answer.status, "done")).inc()
    return answer


def encoded(request: Request, answer: Answer) -> Response:
    """An answer in the request's encoding."""
    if speaks_msgpack(request):
        return Response(msgpack.packb(answer.body), answer.status, media_type="application/msgpack")
    return Response(orjson.dumps(answer.body), answer.status, media_type="application/json")


def _endpoint(route: str, action: Callable[[object], Awaitable[Answer]]) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            answer = await action(await read_object(request))
        except BodyRefusedError as error:
            answer = error.answer
        return encoded(request, counted(route, answer))

    return handle
