"""A simulated memcache MetaService: HTTP for the engines that put and find blocks, ZMQ PUB for whoever watches it."""

import time
from collections.abc import Callable
from typing import Any

import prometheus_client
import zmq.asyncio
from prometheus_client import CollectorRegistry, Gauge
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvroute.sim.memcache_events import MetaServiceNames, encode_batch
from kvroute.sim.pool_store import CPU, DISK, PoolStore
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import ENGINE_TYPE, MEMCACHE, Registration
from services.runtime.http_server import HttpServer

FIRST_SEQUENCE = 1
BYTES_PER_KEY = 2 * 1024 * 1024


class SimulatedMetaService:
    """Listens on http://host:port and publishes on ``endpoint``; port 0 takes a free one.

    max_batch: events per message, as the real one's maxBatchSize.
    """

    def __init__(
        self,
        names: MetaServiceNames,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        endpoint: str = "tcp://127.0.0.1:0",
        max_batch: int = 64,
    ) -> None:
        self.names = names
        self.store = PoolStore()
        self.max_batch = max_batch
        self._context = zmq.asyncio.Context()
        self.publisher = EventPublisher(self._context, endpoint, topic=names.topic)
        self.publisher.sequence = FIRST_SEQUENCE
        self._server = HttpServer(self._app(), host, port)
        self._host = host

    @property
    def endpoint(self) -> str:
        """Where events are published."""
        return self.publisher.endpoint

    @property
    def url(self) -> str:
        """Base of the HTTP interface."""
        return f"http://{self._host}:{self._server.port}"

    def registration(self, instance_id: str, address: str | None = None) -> Registration:
        """The body of POST /register; address: the host under which others reach the pool, when not the bound one."""
        endpoint = f"tcp://{address}:{self.endpoint.rpartition(':')[2]}" if address else self.endpoint
        return {
            "instance_id": instance_id,
            "type": ENGINE_TYPE,
            "modelname": self.names.model_name,
            "block_size": self.names.block_size,
            "dp_rank": 0,
            "endpoint": endpoint,
            "store_backend": MEMCACHE,
        }

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        await self._server.start()

    async def stop(self) -> None:
        """Release both ports."""
        await self._server.stop(grace=1.0)
        await self.publisher.close()
        self._context.destroy(linger=0)

    def publish(self) -> None:
        """Send what has happened since the last call."""
        events = self.store.take_events()
        for first in range(0, len(events), self.max_batch):
            batch = events[first : first + self.max_batch]
            self.publisher.publish(encode_batch(batch, self.names, int(time.time() * 1000)))

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                self._route("/attach", self._attach),
                self._route("/detach", lambda body: self.store.detach(body["backend_id"])),
                self._route("/put", lambda body: self.store.put(body["backend_id"], body["keys"])),
                self._route("/find", self._find),
                self._route("/remove", lambda body: self.store.remove(body["keys"])),
                self._route("/clear", lambda _: self.store.clear()),
                Route("/health", lambda _: PlainTextResponse("OK")),
                Route("/metrics", self._metrics),
            ]
        )

    def _route(self, path: str, act: Callable[[dict[str, Any]], object]) -> Route:
        async def handle(request: Request) -> Response:
            try:
                result = act(await request.json())
            except KeyError as error:
                return JSONResponse({"error": f"unknown backend_id or missing field {error}"}, status_code=404)
            except (TypeError, ValueError) as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            self.publish()
            return JSONResponse({"result": result})

        return Route(path, handle, methods=["POST"])

    def _attach(self, body: dict[str, Any]) -> None:
        self.store.attach(body["backend_id"], body["cpu_keys"], body["disk_keys"])

    def _find(self, body: dict[str, Any]) -> list[tuple[str, str] | None]:
        return [(place.medium, place.backend_id) if place else None for place in self.store.find(body["keys"])]

    def _metrics(self, _: Request) -> Response:
        registry = CollectorRegistry()
        capacity = Gauge("memcache_total_capacity_bytes", "Capacity.", ["medium"], registry=registry)
        allocated = Gauge("memcache_allocated_bytes", "In use.", ["medium"], registry=registry)
        for name, medium in (("dram", CPU), ("ssd", DISK)):
            capacity.labels(name).set(self.store.capacity(medium) * BYTES_PER_KEY)
            allocated.labels(name).set(self.store.used(medium) * BYTES_PER_KEY)
        Gauge("memcache_stored_keys", "Keys.", registry=registry).set(self.store.used(CPU) + self.store.used(DISK))
        Gauge("memcache_evict_operations_total", "Evictions.", registry=registry).set(self.store.evictions)
        return Response(prometheus_client.generate_latest(registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)
