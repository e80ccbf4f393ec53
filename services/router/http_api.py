"""The router's HTTP API: hot routes by hand, everything else on Starlette. It answers before NATS is reached."""

from collections.abc import Callable
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from schemas.events import encode
from schemas.subjects import index_subject
from services.router import metrics
from services.router.consumer import IndexConsumer
from services.router.encodings import MEDIA_TYPES, BodyRefusedError, decode_body, encode_body, encoding_of
from services.router.feedback import Feedback, read_feedback
from services.router.feedback import Response as FeedbackResponse
from services.router.http_query import ROUTES, QueryRoutes, Receive, Scope, Send, read_body
from services.router.message_parts import parts_of
from services.router.openapi import DOCS_PAGE, OPENAPI
from services.router.posted_events import Posted, read_posted_events
from services.router.settings import RouterSettings
from services.router.spaces import Spaces
from services.router.workers import workers_answer
from services.runtime.health import Health, health_routes
from services.runtime.problems import PROBLEM_HANDLERS
from services.runtime.registrar import Registrar
from services.runtime.registration_routes import registration_routes

PUBLISH_SECONDS = 5.0
MAX_FEEDBACK_BYTES = 1024 * 1024
POST_OUTCOMES = {200: "ok", 500: "partial", 503: "unavailable"}
STARTING = "starting: NATS is not reached yet, try again"


@dataclass(frozen=True, slots=True)
class Backend:
    """What the API needs once NATS is reached and the registry is known."""

    js: JetStreamContext
    consumer: IndexConsumer
    registrar: Registrar


class RouterApi:
    """The ASGI application. routes: everything it serves; query: the hot ones, which can also be called directly.

    promise_of: what the receipt of a decision promised, for POST /v1/feedback.
    """

    def __init__(self, spaces: Spaces, health: Health, settings: RouterSettings) -> None:
        self._spaces = spaces
        self._settings = settings
        self._backend: Backend | None = None
        self.query = QueryRoutes(spaces, settings)
        self.feedback = Feedback(lambda: spaces.registry.engines)
        self.promise_of: Callable[[str], FeedbackResponse | None] = lambda receipt: None
        self.routes = [
            *registration_routes(lambda: self._backend.registrar if self._backend else None),
            *(Route(path, _only_post, methods=["POST"]) for path in ROUTES),
            Route("/events", self._events, methods=["POST"]),
            Route("/v1/feedback", self._feedback, methods=["POST"]),
            Route("/workers", self._workers),
            Route("/health", _health),
            Route("/openapi.json", _openapi),
            Route("/docs", _docs),
            *health_routes(health),
        ]
        rest = Starlette(routes=self.routes, exception_handlers=PROBLEM_HANDLERS)
        self._rest = CORSMiddleware(rest, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

    def connect(self, backend: Backend) -> None:
        """From now on everything can be answered."""
        self._backend = backend
        self.query.ready = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route one request."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in ROUTES:
            await self.query(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def _workers(self, request: Request) -> Response:
        if self._backend is None:
            return JSONResponse({"error": STARTING}, 503)
        return JSONResponse(workers_answer(self._spaces, self.feedback))

    async def _events(self, request: Request) -> Response:
        encoding = encoding_of(request.headers.get("content-type"))
        try:
            raw = await read_body(request.receive, self._settings.max_body_bytes)
            fields = decode_body(raw, encoding, "events")
            status, answer = await self._post_events(fields)
        except BodyRefusedError as error:
            status, answer = error.status, {"error": str(error)}
        metrics.POSTS.labels(POST_OUTCOMES.get(status, "refused")).inc()
        return Response(encode_body(answer, encoding), status, media_type=MEDIA_TYPES[encoding])

    async def _feedback(self, request: Request) -> Response:
        encoding = encoding_of(request.headers.get("content-type"))
        answer: dict[str, object]
        try:
            raw = await read_body(request.receive, MAX_FEEDBACK_BYTES)
            responses = read_feedback(decode_body(raw, encoding, "feedback"), self.promise_of)
            taken = self.feedback.take(responses)
            metrics.FEEDBACK.labels("taken").inc(taken)
            metrics.FEEDBACK.labels("unknown_instance").inc(len(responses) - taken)
            status, answer = 200, {"status": "ok", "taken": taken, "unknown": len(responses) - taken}
        except BodyRefusedError as error:
            metrics.FEEDBACK.labels("refused").inc()
            status, answer = error.status, {"error": str(error)}
        return Response(encode_body(answer, encoding), status, media_type=MEDIA_TYPES[encoding])

    async def _post_events(self, fields: dict[str, object]) -> tuple[int, dict[str, object]]:
        if self._backend is None:
            raise BodyRefusedError(STARTING, 503)
        posted = read_posted_events(fields, self._spaces.registry.engines, self._spaces.publishers)
        await self._publish(posted, self._backend)
        metrics.POSTED_EVENTS.labels("applied").inc(posted.applied)
        metrics.POSTED_EVENTS.labels("refused").inc(posted.refused)
        if posted.errors:
            return 500, {"status": "partial", "events_applied": posted.applied, "errors": list(posted.errors)}
        return 200, {"status": "ok", "events_applied": posted.applied}

    async def _publish(self, posted: Posted, backend: Backend) -> None:
        """Into the stream, so that every router applies them; returns when this one has."""
        last = 0
        try:
            for batch in posted.batches:
                for part in parts_of(batch):
                    subject = index_subject(part.model, part.tenant)
                    stored = await backend.js.publish(subject, encode(part), timeout=PUBLISH_SECONDS)
                    last = stored.seq
        except (NatsError, TimeoutError) as error:
            text = str(error) or type(error).__name__
            raise BodyRefusedError(f"events cannot be stored: {text}; send them again", 503) from None
        if last and not await backend.consumer.wait_for(last, self._settings.events_timeout):
            raise BodyRefusedError("events are stored but not applied yet; /readyz says why", 503)


async def _only_post(request: Request) -> Response:
    """Never reached: POST to a hot path is answered before; the route makes every other method a 405."""
    raise AssertionError(request.url.path)


async def _health(request: Request) -> Response:
    return PlainTextResponse("OK")


async def _openapi(request: Request) -> Response:
    return JSONResponse(OPENAPI)


async def _docs(request: Request) -> Response:
    return HTMLResponse(DOCS_PAGE)
