"""Wires the matcher: registry watch, Redis, the FastStream broker, HTTP."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from services.matcher.asyncapi import document
from services.matcher.leadership import FINISH_SECONDS, Replica
from services.matcher.redis_client import make_client
from services.matcher.redis_store import RedisStore
from services.matcher.reporting import Reporter
from services.matcher.subscription import make_broker, stop_broker
from services.runtime.accounts import AccountMetrics
from services.runtime.broker import connect_nats, ensure_streams
from services.runtime.config import Config
from services.runtime.health import Health, health_routes
from services.runtime.http_server import HttpServer
from services.runtime.logging import get_logger
from services.runtime.metrics import REGISTRY
from services.runtime.problems import PROBLEM_HANDLERS
from services.runtime.registry_store import RegistryWatch
from services.runtime.taps import StateTap

log = get_logger("matcher")


@contextlib.asynccontextmanager
async def start(config: Config, health: Health) -> AsyncIterator[None]:
    """Run the matcher while the context is open."""
    settings = config.matcher
    health.set("role", False, "not started")
    server = HttpServer(make_app(config, health), settings.host, settings.port)
    await server.start()
    log.info("listening", port=server.port)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        nc = await connect_nats(config.nats, "kvroute-matcher", health)
        stack.push_async_callback(nc.close)
        js = nc.jetstream()
        await ensure_streams(js, config.nats)
        broker = make_broker(config.nats, "kvroute-matcher-consumer")
        await broker.start()
        stack.push_async_callback(stop_broker, broker)
        client = make_client(config.redis)
        stack.push_async_callback(client.aclose)
        tap = StateTap(nc, "matcher", config.runtime.taps_per_second)
        stack.push_async_callback(tap.stop)
        store = RedisStore(client, settings)
        make_streams = partial(ensure_streams, js, config.nats)
        finish_seconds = min(FINISH_SECONDS, config.runtime.shutdown_grace / 3)
        reporter = Reporter(tap)
        replica = Replica(nc, js, broker, client, store, reporter, health, settings, make_streams, finish_seconds)
        watch = RegistryWatch(js, replica.registry_changed)
        await watch.start()
        stack.push_async_callback(watch.stop)
        account_metrics = AccountMetrics("matcher", replica.accounts)
        REGISTRY.register(account_metrics)
        stack.callback(REGISTRY.unregister, account_metrics)
        replica.start(watch)
        stack.push_async_callback(replica.stop)
        yield


def make_app(config: Config, health: Health) -> Starlette:
    """Health, metrics and the AsyncAPI document."""
    text, page = document(config.nats.servers()[0] if config.nats.servers() else "")

    async def asyncapi_json(request: Request) -> Response:
        return Response(text, media_type="application/json")

    async def asyncapi_html(request: Request) -> Response:
        return HTMLResponse(page)

    routes = [Route("/asyncapi.json", asyncapi_json), Route("/asyncapi", asyncapi_html)]
    return Starlette(routes=[*routes, *health_routes(health)], exception_handlers=PROBLEM_HANDLERS)
