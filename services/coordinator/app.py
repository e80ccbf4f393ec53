"""Wiring of the coordinator: the registry's keeper, the store's metrics, three HTTP ports."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from nats.errors import Error as NatsError
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from services.coordinator.controller_updates import ControllerUpdates
from services.coordinator.frontdoor.load import LoadAccount
from services.coordinator.frontdoor.routes import OPENAI_HANDLERS, engine_client, front_door_routes
from services.coordinator.liveness.clearing import clear_npu
from services.coordinator.liveness.prober import Prober
from services.coordinator.management import Cluster, management_routes
from services.coordinator.metrics_port import metrics_routes
from services.coordinator.registry_metrics import RegistryMetrics
from services.coordinator.static_registrations import StaticRegistrations
from services.coordinator.store_metrics.collector import StoreMetrics
from services.coordinator.store_metrics.endpoint import SERVICE_VARIABLE, store_endpoint
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.http_server import HttpServer
from services.runtime.liveness_view import LivenessView
from services.runtime.logging import get_logger
from services.runtime.metrics import REGISTRY
from services.runtime.problems import PROBLEM_HANDLERS
from services.runtime.registrar import Registrar
from services.runtime.registry_store import RegistryStore, RegistryWatch
from services.runtime.tasks import end_tasks

GRACE_SECONDS = 2.0
SWEEP_SECONDS = 600.0
KEEP_TOMBSTONES_LONGER = 3600.0

log = get_logger("coordinator")


@dataclass(slots=True)
class Coordinator:
    """A running coordinator and the ports it really listens on."""

    cluster: Cluster
    load: LoadAccount
    inference_port: int
    management_port: int
    metrics_port: int


@contextlib.asynccontextmanager
async def coordinator(config: Config, health: Health) -> AsyncIterator[Coordinator]:
    """Run the coordinator for as long as the context is open. Its ports answer while NATS is still waited for."""
    settings = config.coordinator
    cluster = Cluster()
    health.set("registry", False, "waiting for the registry")
    async with contextlib.AsyncExitStack() as stack:
        store_metrics = StoreMetrics(settings.store_metrics, store_endpoint(settings.store_metrics, os.environ))
        store_metrics.start()
        stack.push_async_callback(store_metrics.stop)
        of_the_store = CollectorRegistry()
        of_the_store.register(store_metrics)
        own = RegistryMetrics(lambda: cluster.registry)
        REGISTRY.register(own)
        stack.callback(REGISTRY.unregister, own)
        management = await _serve(
            stack,
            Starlette(routes=management_routes(cluster, settings, health), exception_handlers=PROBLEM_HANDLERS),
            settings.host,
            settings.management_port,
        )
        metrics_app = Starlette(routes=metrics_routes(health, of_the_store), exception_handlers=PROBLEM_HANDLERS)
        metrics = await _serve(stack, metrics_app, settings.host, settings.metrics_port)
        load = LoadAccount()
        client = await stack.enter_async_context(engine_client(settings.front_door))
        routes = front_door_routes(lambda: cluster.registry_of_the_living, client, load, settings.front_door, health)
        inference = await _serve(
            stack, Starlette(routes=routes, exception_handlers=OPENAI_HANDLERS), settings.host, settings.inference_port
        )
        nc = await connect_nats(config.nats, "kvroute-coordinator", health)
        stack.push_async_callback(nc.close)
        js = nc.jetstream()
        await ensure_streams(js, config.nats)
        watch = RegistryWatch(js)
        stack.push_async_callback(watch.stop)
        await watch.start()
        pool_service = os.environ.get(SERVICE_VARIABLE)
        registrar = Registrar(RegistryStore(js), watch, pool_service)
        updates = ControllerUpdates(registrar)
        updates.start()
        stack.push_async_callback(updates.stop)
        kept = StaticRegistrations(settings, registrar, health, pool_service)
        kept.start()
        stack.push_async_callback(kept.stop)
        sweeping = asyncio.create_task(_sweep(registrar, config), name="sweep-tombstones")
        stack.push_async_callback(end_tasks, [sweeping])
        liveness = LivenessView(js)
        liveness.start()
        stack.push_async_callback(liveness.stop)
        prober = Prober(js, lambda: watch.registry, settings.liveness, partial(clear_npu, js))
        prober.start()
        stack.push_async_callback(prober.stop)
        cluster.liveness = liveness
        cluster.watch, cluster.updates, cluster.registrar = watch, updates, registrar
        health.set("registry", True)
        log.info("listening", inference=inference.port, management=management.port, metrics=metrics.port)
        try:
            yield Coordinator(cluster, load, inference.port, management.port, metrics.port)
        finally:
            await asyncio.gather(*(server.stop(GRACE_SECONDS) for server in (inference, management, metrics)))


async def _serve(stack: contextlib.AsyncExitStack, app: Starlette, host: str, port: int) -> HttpServer:
    server = HttpServer(app, host, port)
    await server.start()
    stack.push_async_callback(server.stop, GRACE_SECONDS)
    return server


async def _sweep(registrar: Registrar, config: Config) -> None:
    """Forget tombstones when the streams no longer hold anything that they could discard."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        with contextlib.suppress(NatsError, TimeoutError):
            await registrar.sweep(config.nats.stream_max_age + KEEP_TOMBSTONES_LONGER)
