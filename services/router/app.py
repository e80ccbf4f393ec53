"""Wires the router: registry watch, index consumer, HTTP API."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial

from services.router import metrics
from services.router.budget import Budget, coverage
from services.router.consumer import IndexConsumer
from services.router.freshness import Freshness, StandingMetrics
from services.router.healing import Healing
from services.router.http_api import Backend, RouterApi
from services.router.http_query import ROUTES
from services.router.index import create_index, native_available
from services.router.index.port import PrefixIndex
from services.router.progress import CONDITION
from services.router.publishers import spaces_of
from services.router.settings import RouterSettings
from services.router.snapshots import Snapshots
from services.router.spaces import Spaces
from services.runtime.accounts import AccountMetrics
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.http_server import HttpServer
from services.runtime.logging import get_logger
from services.runtime.metrics import REGISTRY
from services.runtime.registrar import Registrar
from services.runtime.registry_store import RegistryStore, RegistryWatch

SIZES_SECONDS = 2.0

log = get_logger("router")


@contextlib.asynccontextmanager
async def start(config: Config, health: Health) -> AsyncIterator[None]:
    """Run the router while the context is open. HTTP is up first and says in /readyz what is waited for."""
    settings = config.router
    budget = Budget(settings.max_bytes, settings.max_space_bytes)
    spaces = Spaces(lambda: make_index(settings), settings.max_spaces, settings.stale_after, budget)
    announce_index(settings, health)
    health.set(CONDITION, False, "the registry is not read yet")
    api = RouterApi(spaces, health, settings)
    shared = settings.worker > 0
    server = HttpServer(api, settings.host, settings.port, shared, direct=api.query, direct_paths=ROUTES)
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        log.info("listening", port=server.port)
        if shared:
            own = HttpServer(api, settings.host, settings.port + settings.worker, direct=api.query, direct_paths=ROUTES)
            await own.start()
            stack.push_async_callback(own.stop)
            log.info("listening", port=own.port, worker=settings.worker)
        standing_metrics = StandingMetrics(spaces)
        for collector in (standing_metrics, AccountMetrics("router", spaces.accounts), api.feedback):
            REGISTRY.register(collector)
            stack.callback(REGISTRY.unregister, collector)
        nc = await connect_nats(config.nats, "kvroute-router", health)
        stack.push_async_callback(nc.close)
        js = nc.jetstream()
        await ensure_streams(js, config.nats)
        watch = RegistryWatch(js, spaces.set_registry)
        await watch.start()
        stack.push_async_callback(watch.stop)
        restore_streams = partial(ensure_streams, js, config.nats)
        consumer = IndexConsumer(nc, js, spaces, health, settings.catch_up_timeout, restore_streams)
        snapshots = Snapshots(
            js,
            spaces,
            consumer,
            partial(make_index, settings),
            settings.snapshot_interval,
            settings.snapshot_timeout,
            config.runtime.shutdown_grace,
        )
        health.set(CONDITION, False, "restoring the last snapshot")
        await snapshots.restore()
        snapshots.start()
        stack.push_async_callback(snapshots.stop)
        consumer.start()
        stack.push_async_callback(consumer.stop)
        freshness = Freshness(nc, js, spaces, consumer, health)
        freshness.start()
        stack.push_async_callback(freshness.stop)
        healing = Healing(nc, spaces, snapshots)
        healing.start()
        stack.push_async_callback(healing.stop)
        registrar = Registrar(RegistryStore(js), watch, os.environ.get("KVS_MASTER_SERVICE"))
        api.connect(Backend(js, consumer, registrar))
        sizes = asyncio.create_task(report_sizes(spaces), name="sizes")
        stack.callback(sizes.cancel)
        # Once more, to be the first thing that stops: what is being answered still finds everything there.
        stack.push_async_callback(server.stop)
        yield


def make_index(settings: RouterSettings) -> PrefixIndex:
    """A new index as configured."""
    return create_index(settings.index, settings.max_blocks, settings.max_waiting_blocks)


def announce_index(settings: RouterSettings, health: Health) -> None:
    """Say in log, readiness and metrics which index is in use."""
    native = settings.index == "native" or (settings.index == "auto" and native_available())
    metrics.NATIVE.set(int(native))
    if native:
        log.info("index", implementation="native")
        return
    reason = "router.index is plain" if settings.index == "plain" else "the compiled core was not built (no C compiler)"
    log.warning("index", implementation="plain", reason=reason)
    health.note("index", f"plain index in use: {reason}")


async def report_sizes(spaces: Spaces) -> None:
    """Keep the size metrics current; spaces that are gone leave no series behind."""
    shown: set[tuple[str, str]] = set()
    gauges = (
        metrics.BLOCKS,
        metrics.MEMBERSHIPS,
        metrics.WAITING,
        metrics.EVICTED,
        metrics.INDEX_BYTES,
        metrics.COVERAGE,
    )
    while True:
        registered = spaces_of([*spaces.registry.engines.values(), *spaces.registry.pools.values()])
        for key in shown - registered:
            for gauge in gauges:
                with contextlib.suppress(KeyError):
                    gauge.remove(*key)
        shown = registered & spaces.spaces.keys()
        for key in shown:
            stats = spaces.spaces[key].index.stats()
            known = coverage(stats.memberships, stats.forgotten)
            values = (stats.blocks, stats.memberships, stats.waiting, stats.evicted, stats.bytes, known)
            for gauge, value in zip(gauges, values, strict=True):
                gauge.labels(*key).set(value)
        await asyncio.sleep(SIZES_SECONDS)
