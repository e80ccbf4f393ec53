"""Routes of the management port: registration, what is registered, controller messages, probes."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from schemas.liveness import Liveness
from schemas.registration import RegistrationError
from services.coordinator.controller_events import parse_controller_event
from services.coordinator.controller_updates import ControllerUpdates
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.views import instances_view, pools_view, with_the_dead_paused
from services.runtime.health import Health, health_routes
from services.runtime.liveness_view import LivenessView
from services.runtime.registrar import Registrar
from services.runtime.registration_answers import Answer, refused, starting
from services.runtime.registration_routes import BodyRefusedError, counted, encoded, read_object, registration_routes
from services.runtime.registry_store import Registry, RegistryWatch

MAX_REFRESH_BYTES = 10 * 1024 * 1024


@dataclass(slots=True)
class Cluster:
    """What the routes work on; empty until NATS is reached."""

    registrar: Registrar | None = None
    watch: RegistryWatch | None = None
    updates: ControllerUpdates | None = None
    liveness: LivenessView | None = None
    started_at: float = field(default_factory=time.time)

    def liveness_of(self, instance_id: str, dp_rank: int) -> Liveness | None:
        """What the health checks say of an engine rank, None for nothing."""
        return self.liveness.of(instance_id, dp_rank) if self.liveness is not None else None

    @property
    def registry_of_the_living(self) -> Registry | None:
        """The registry in which engines that do not answer their health check take no new requests."""
        return with_the_dead_paused(self.watch.registry, self.liveness_of) if self.watch is not None else None

    @property
    def registry(self) -> Registry | None:
        """The registry as it is known now."""
        return self.watch.registry if self.watch is not None else None


def management_routes(cluster: Cluster, settings: CoordinatorSettings, health: Health) -> list[Route]:
    """All routes of the management port."""

    async def instances(request: Request) -> Response:
        registry = cluster.registry
        if registry is None:
            return encoded(request, starting())
        return encoded(request, Answer(200, {"instances": instances_view(registry, cluster.liveness_of, time.time())}))

    async def pools(request: Request) -> Response:
        registry = cluster.registry
        if registry is None:
            return encoded(request, starting())
        return encoded(request, Answer(200, {"pools": pools_view(registry, time.time())}))

    async def delete(request: Request) -> Response:
        if cluster.registrar is None:
            return encoded(request, starting())
        answer = await cluster.registrar.unregister_instance(request.path_params["instance_id"])
        return encoded(request, counted("/instances", answer))

    async def refresh(request: Request) -> Response:
        try:
            body = await read_object(request, MAX_REFRESH_BYTES)
            event = parse_controller_event(body, settings)
        except BodyRefusedError as error:
            return encoded(request, counted("/instances/refresh", error.answer))
        except RegistrationError as error:
            answer = counted("/instances/refresh", refused(error.problems))
            return encoded(request, Answer(400, answer.body))
        if cluster.updates is None or not cluster.updates.accept(event):
            return encoded(request, counted("/instances/refresh", starting()))
        accepted = {
            "status": "success",
            "event": str(event.kind),
            "accepted": [name for name in event.named if name not in event.refused],
            "not_targets": event.not_targets,
            "refused": {name: [str(problem) for problem in problems] for name, problems in event.refused.items()},
        }
        return encoded(request, counted("/instances/refresh", Answer(200, accepted)))

    async def startup(request: Request) -> Response:
        ready = cluster.registrar is not None
        return encoded(request, Answer(200 if ready else 503, {"started": ready}))

    async def liveness(request: Request) -> Response:
        return encoded(request, Answer(200, {"alive": True, "uptime_seconds": round(time.time() - cluster.started_at)}))

    async def readiness(request: Request) -> Response:
        # 200 also when not ready: as 503 it would take the Pod out of the Service through which controllers reach it.
        return encoded(request, Answer(200, health.report()))

    async def root(request: Request) -> Response:
        return PlainTextResponse(
            "kvroute coordinator: /register /unregister /instances /pools /instances/refresh /readyz\n"
        )

    return [
        *registration_routes(lambda: cluster.registrar),
        Route("/instances", instances),
        Route("/instances/refresh", refresh, methods=["POST"]),
        Route("/instances/{instance_id:path}", delete, methods=["DELETE"]),
        Route("/pools", pools),
        Route("/startup", startup),
        Route("/liveness", liveness),
        Route("/readiness", readiness),
        Route("/", root),
        *health_routes(health),
    ]
