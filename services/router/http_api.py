"""The router's HTTP API: hot routes by hand, everything else on Starlette."""

from typing import Any

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from schemas.events import encode
from schemas.subjects import index_subject
from services.router.consumer import IndexConsumer
from services.router.http_query import MEDIA_TYPES, QueryRoutes, Receive, Scope, Send, read_body
from services.router.openapi import DOCS_PAGE, OPENAPI
from services.router.posted_events import read_posted_events
from services.router.request_bodies import BodyRefusedError, decode_body, encode_body, encoding_of
from services.router.settings import RouterSettings
from services.router.spaces import Spaces
from services.router.workers import workers_answer
from services.runtime.health import Health, health_routes
from services.runtime.registrar import Registrar
from services.runtime.registration_routes import registration_routes

HOT_PATHS = frozenset({"/query", "/query_by_hash"})


class RouterApi:
    """The ASGI application."""

    def __init__(
        self,
        spaces: Spaces,
        consumer: IndexConsumer,
        js: JetStreamContext,
        registrar: Registrar,
        health: Health,
        settings: RouterSettings,
    ) -> None:
        self._spaces = spaces
        self._consumer = consumer
        self._js = js
        self._settings = settings
        self._query = QueryRoutes(spaces, settings)
        routes = [
            *registration_routes(registrar),
            *(Route(path, _only_post, methods=["POST"]) for path in sorted(HOT_PATHS)),
            Route("/events", self._events, methods=["POST"]),
            Route("/workers", self._workers),
            Route("/health", _health),
            Route("/openapi.json", _openapi),
            Route("/docs", _docs),
            *health_routes(health),
        ]
        self._rest = CORSMiddleware(
            Starlette(routes=routes), allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in HOT_PATHS:
            await self._query(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def _workers(self, request: Request) -> Response:
        return JSONResponse(workers_answer(self._spaces))

    async def _events(self, request: Request) -> Response:
        encoding = encoding_of(request.headers.get("content-type"))

        def answer(status: int, body: dict[str, Any]) -> Response:
            return Response(encode_body(body, encoding), status, media_type=MEDIA_TYPES[encoding].decode())

        try:
            raw = await read_body(request.receive, self._settings.max_body_bytes)
            posted = read_posted_events(decode_body(raw, encoding, "events"), self._spaces.registry)
        except BodyRefusedError as error:
            return answer(error.status, {"error": str(error)})
        if posted.batch.groups:
            try:
                stored = await self._js.publish(
                    index_subject(posted.batch.model, posted.batch.tenant), encode(posted.batch), timeout=5.0
                )
                applied = await self._consumer.wait_for(stored.seq, self._settings.events_timeout)
            except (NatsError, TimeoutError) as error:
                return answer(503, {"error": f"events cannot be stored: {str(error) or type(error).__name__}"})
            if not applied:
                return answer(503, {"error": "events are stored but not applied yet; ask /readyz for the reason"})
        if posted.errors:
            body = {"status": "partial", "events_applied": posted.applied, "errors": list(posted.errors)}
            return answer(500, body)
        return answer(200, {"status": "ok", "events_applied": posted.applied})


async def _only_post(request: Request) -> Response:
    """Never reached: POST to a hot path is answered before; the route makes every other method a 405."""
    raise AssertionError(request.url.path)


async def _health(request: Request) -> Response:
    return PlainTextResponse("OK")


async def _openapi(request: Request) -> Response:
    return JSONResponse(OPENAPI)


async def _docs(request: Request) -> Response:
    return HTMLResponse(DOCS_PAGE)
