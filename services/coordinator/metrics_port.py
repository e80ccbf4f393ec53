"""Routes of the metrics port."""

import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.runtime.health import Health
from services.runtime.metrics import REGISTRY

TYPES = ("full", "instance", "role", "dp", "node")


def metrics_routes(health: Health, store: CollectorRegistry, registry: CollectorRegistry = REGISTRY) -> list[Route]:
    """``/metrics`` (own metrics; the store's too with ``type=full``, the default), ``/health``."""

    async def metrics(request: Request) -> Response:
        kind = request.query_params.get("type", "full")
        if kind not in TYPES:
            return JSONResponse({"error": f"type must be one of {', '.join(TYPES)}"}, status_code=400)
        if request.query_params.get("format", "prometheus") != "prometheus":
            return JSONResponse({"error": "format must be prometheus"}, status_code=400)
        body = generate_latest(registry)
        if kind == "full":
            body += generate_latest(store)
        return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthy(request: Request) -> Response:
        status = "healthy" if health.ready else "not_ready"
        return JSONResponse({"status": status, "timestamp": time.time(), **health.report()})

    async def gone(request: Request) -> Response:
        return JSONResponse({"error": "gone, read /metrics"}, status_code=410)

    return [Route("/metrics", metrics), Route("/health", healthy), Route("/instance/metrics", gone)]
