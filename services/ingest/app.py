"""Wiring of ingest: registry to sockets, sockets to intakes, intakes to JetStream, and the HTTP server beside them."""

import asyncio
import contextlib
import functools
import resource
import time
from collections.abc import AsyncIterator

import orjson
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from schemas.subjects import RESYNC_ALL, parse_resync_subject
from services.ingest.complaints import Complaints
from services.ingest.cursor_store import CursorStore
from services.ingest.publishing import BatchPublisher
from services.ingest.reporting import Reporter
from services.ingest.status import PublisherMetrics, publisher_status
from services.ingest.stream_records import StreamRecords
from services.ingest.subscriptions import Subscriptions
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.config import Config
from services.runtime.health import Health, health_routes
from services.runtime.http_server import HttpServer
from services.runtime.logging import get_logger
from services.runtime.metrics import REGISTRY
from services.runtime.problems import PROBLEM_HANDLERS
from services.runtime.registry_store import Registry, RegistryWatch
from services.runtime.taps import StateTap
from services.runtime.tasks import end_tasks

CHECK_SECONDS = 1.0
REOPEN_SECONDS = 10.0
GRACE_FOR_THE_REST_SECONDS = 2.0

log = get_logger("ingest")


@contextlib.asynccontextmanager
async def ingest(config: Config, health: Health) -> AsyncIterator[Subscriptions]:
    """Run ingest for as long as the context is open; leaving it stops receiving, then sends what was received."""
    settings = config.ingest
    _allow_many_files()
    health.set("registry", False, "waiting for the registry")
    async with contextlib.AsyncExitStack() as stack:
        holder: list[Subscriptions] = []
        server = HttpServer(_http_app(health, holder), settings.host, settings.port)
        await server.start()
        stack.push_async_callback(server.stop, GRACE_FOR_THE_REST_SECONDS)
        nc = await connect_nats(config.nats, "kvroute-ingest", health)
        stack.push_async_callback(nc.close)
        js = nc.jetstream()
        await ensure_streams(js, config.nats)
        tap = StateTap(nc, "ingest", config.runtime.taps_per_second)
        stack.push_async_callback(tap.stop)
        batches = BatchPublisher(nc, js, settings.linger, settings.acknowledge_timeout)
        await batches.start()
        cursors = CursorStore(js)
        reporter = Reporter(tap, config.runtime.taps_per_second)
        subscriptions = Subscriptions(
            settings,
            batches,
            cursors.position_of,
            reporter.message,
            reporter.link,
            reporter.failure,
        )
        holder.append(subscriptions)
        stack.callback(subscriptions.close)
        collector = PublisherMetrics(lambda: subscriptions)
        REGISTRY.register(collector)
        stack.callback(REGISTRY.unregister, collector)

        def follow(registry: Registry) -> None:
            subscriptions.apply([*registry.engines.values(), *registry.pools.values()])
            for subscription in subscriptions:
                if subscription.error:
                    reporter.cannot_subscribe(subscription)

        watch = RegistryWatch(js, follow)
        stack.push_async_callback(watch.stop)
        await watch.start()
        health.set("registry", True)
        records = asyncio.create_task(
            StreamRecords(nc, config.nats.stream_state_ttl, lambda: subscriptions).run(), name="ingest-stream-records"
        )
        cursor_writer = asyncio.create_task(cursors.run(lambda: subscriptions), name="ingest-cursors")
        repairs = asyncio.create_task(subscriptions.look_after(), name="ingest-repairs")
        resyncs = await nc.subscribe(RESYNC_ALL, cb=functools.partial(_resync, subscriptions))
        checks = asyncio.create_task(_check(config, health, js, batches, subscriptions), name="ingest-checks")
        log.info("listening", port=server.port, publishers=len(subscriptions))
        try:
            yield subscriptions
        finally:
            await end_tasks([checks, records, cursor_writer, repairs])
            with contextlib.suppress(NatsError):
                await resyncs.unsubscribe()
            await watch.stop()
            subscriptions.stop_receiving()
            await batches.stop(max(0.5, config.runtime.shutdown_grace - GRACE_FOR_THE_REST_SECONDS))
            if left := sum(len(subscription.intake.buffer) for subscription in subscriptions):
                log.error("stopped_with_unsent_batches", batches=left)


async def _resync(subscriptions: Subscriptions, message: Msg) -> None:
    """``kv.control.resync.<source>.<instance>.<dp>``: ask this publisher for all that it can still tell."""
    try:
        source, instance_id, dp_rank = parse_resync_subject(message.subject)
    except ValueError as error:
        log.warning("resync_refused", subject=message.subject, error=str(error))
        return
    found = subscriptions.resync(source, instance_id, dp_rank)
    log.info("resync", source=source, instance_id=instance_id, dp_rank=dp_rank, publishers=found)


async def _check(
    config: Config, health: Health, js: JetStreamContext, batches: BatchPublisher, subscriptions: Subscriptions
) -> None:
    """Keep readiness true to what happens, re-make a lost stream, re-open what could not be opened."""
    reopened = time.monotonic()
    complaints = Complaints(health)
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        complaints.look(subscriptions, time.time())
        if lost := sum(abs(subscription.intake.unaccounted) for subscription in subscriptions):
            log.error("messages_unaccounted", messages=lost)
        if health.set("publishing", not batches.trouble, batches.trouble):
            say = log.warning if batches.trouble else log.info
            say("publishing", ok=not batches.trouble, reason=batches.trouble)
        if batches.no_stream.is_set():
            await ensure_streams(js, config.nats)
            batches.no_stream.clear()
        if time.monotonic() - reopened > REOPEN_SECONDS:
            reopened = time.monotonic()
            subscriptions.retry_failed()


def _http_app(health: Health, holder: list[Subscriptions]) -> Starlette:
    async def publishers(request: Request) -> Response:
        now = time.time()
        subscriptions = holder[0] if holder else ()
        body = {"publishers": [publisher_status(subscription, now) for subscription in subscriptions]}
        return Response(orjson.dumps(body), media_type="application/json")

    return Starlette(
        routes=[*health_routes(health), Route("/publishers", publishers)], exception_handlers=PROBLEM_HANDLERS
    )


def _allow_many_files() -> None:
    """Every publisher needs a few file descriptors: take all that the system gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
