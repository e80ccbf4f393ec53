"""Liveness and readiness: named conditions with reasons, served on /livez and /readyz beside /metrics."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.runtime.metrics import REGISTRY


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing a service needs. `since`: seconds since the epoch at which it took this value."""

    ok: bool
    reason: str
    since: float


class Health:
    """The conditions of one process; ready when all hold and none is missing."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.stopping = False
        self.notes: dict[str, str] = {}
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._conditions: dict[str, Condition] = {}

    def set(self, condition: str, ok: bool, reason: str = "") -> bool:
        """Record a condition; True when it changed (so that callers log changes only)."""
        before = self._conditions.get(condition)
        if before is not None and (before.ok, before.reason) == (ok, reason):
            return False
        since = before.since if before is not None and before.ok == ok else time.time()
        self._conditions[condition] = Condition(ok, reason, since)
        return before is None or before.ok != ok

    def note(self, name: str, text: str) -> None:
        """A remark that does not touch readiness (for example a slower fallback in use); empty removes it."""
        if text:
            self.notes[name] = text
        else:
            self.notes.pop(name, None)

    def fail(self, reason: str) -> None:
        """What this process cannot recover from: it stops, for its supervisor to start another."""
        self.set("failed", False, reason)
        self.on_failure(reason)

    @property
    def ready(self) -> bool:
        """Whether the service can do its work now."""
        return not self.stopping and all(condition.ok for condition in self._conditions.values())

    def report(self) -> dict[str, object]:
        """The body of /readyz."""
        return {
            "service": self.service,
            "ready": self.ready,
            "stopping": self.stopping,
            "conditions": {
                name: {
                    "ok": condition.ok,
                    "reason": condition.reason,
                    "seconds": round(time.time() - condition.since, 1),
                }
                for name, condition in self._conditions.items()
            },
            "notes": self.notes,
        }


def health_routes(health: Health, registry: CollectorRegistry = REGISTRY) -> list[Route]:
    """Routes for /livez (200 while the loop turns), /readyz (200 or 503 with reasons) and /metrics."""

    async def livez(request: Request) -> Response:
        return Response(b"ok\n", media_type="text/plain")

    async def readyz(request: Request) -> Response:
        body = orjson.dumps(health.report())
        return Response(body, status_code=200 if health.ready else 503, media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)]
