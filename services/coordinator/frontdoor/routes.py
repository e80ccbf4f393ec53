"""Routes of the inference port."""

import time
from collections.abc import Callable

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.coordinator.frontdoor import metrics
from services.coordinator.frontdoor.choice import served_models
from services.coordinator.frontdoor.load import LoadAccount
from services.coordinator.frontdoor.prefix import PrefixLookup
from services.coordinator.frontdoor.prompts import CHAT, COMPLETIONS, TOKENIZE
from services.coordinator.frontdoor.relay import Relay
from services.coordinator.frontdoor.settings import FrontDoorSettings
from services.runtime.health import Health
from services.runtime.registry_store import Registry

MAX_CONNECTIONS = 10_000
MAX_IDLE_CONNECTIONS = 1_000
# Below the 5 s after which vLLM closes an idle connection: one that is about to be closed must not be used again.
IDLE_SECONDS = 2.0


def engine_client(settings: FrontDoorSettings) -> httpx.AsyncClient:
    """The HTTP client for engines and router; waits between bytes as long as for the first one."""
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        headers={"Accept-Encoding": "identity"},  # unless the caller asks for more: its answer is passed on as it is
        timeout=httpx.Timeout(settings.first_byte_timeout, connect=settings.connect_timeout, pool=None),
        limits=httpx.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_SECONDS,
        ),
    )


def front_door_routes(
    registry: Callable[[], Registry | None],
    client: httpx.AsyncClient,
    load: LoadAccount,
    settings: FrontDoorSettings,
    health: Health,
) -> list[Route]:
    """The OpenAI API: completions, chat completions, models, tokenize; and a probe."""
    lookup = PrefixLookup(client, settings)
    metrics.RUNNING.set_function(lambda: load.total)

    async def models(request: Request) -> Response:
        known = registry()
        if known is None:
            return JSONResponse({"error": {"message": "starting", "type": "InternalServerError", "code": 503}}, 503)
        created = int(time.time())
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "kvroute"} for name in served_models(known)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def healthy(request: Request) -> Response:
        return Response(status_code=200 if health.ready else 503)

    def relay(path: str) -> Route:
        return Route(path, Relay(path, registry, client, lookup, load, settings), methods=["POST"])

    return [
        *(relay(path) for path in (COMPLETIONS, CHAT, TOKENIZE)),
        Route("/v1/models", models),
        Route("/health", healthy),
    ]


async def _openai_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods in the shape that OpenAI clients read."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind = "InternalServerError" if status == 500 else "NotFoundError"
    message = f"{request.method} {request.url.path[:200]} is not served; see /v1/models and /v1/chat/completions"
    if status == 500:
        message = "internal error, see the coordinator's log"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


OPENAI_HANDLERS = {HTTPException: _openai_error, Exception: _openai_error}
