"""What the end-to-end tests share: publishers under their control, the router's HTTP API, waiting with a deadline."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import nats
import zmq.asyncio
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from kvroute.sim.memcache_events import MetaServiceNames
from kvroute.sim.memcache_events import encode_batch as encode_pool_batch
from kvroute.sim.pool_store import PoolEvent
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.vllm_events import EngineEvent
from kvroute.sim.vllm_events import encode_batch as encode_engine_batch
from schemas.subjects import EVENTS_STREAM, INDEX_STREAM, MATCHER_CONSUMER

DEADLINE_SECONDS = 15.0
POLL_SECONDS = 0.01
ROUTER_POSITION = "kvroute_router_stream_position"

_numbers = itertools.count()


def unique(name: str) -> str:
    """A name no other test uses, so that tests can share one stack."""
    return f"{name}-{next(_numbers)}"


async def eventually(read: Callable[[], Awaitable[Any]], expected: Any, deadline: float = DEADLINE_SECONDS) -> None:
    """Read until the value is as expected; fails with the last value seen."""
    give_up = time.monotonic() + deadline
    while (value := await read()) != expected:
        assert time.monotonic() < give_up, f"still {value!r} after {deadline} s, expected {expected!r}"
        await asyncio.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class Counts:
    """A worker's entry in the answer of /query."""

    npu: int = 0
    cpu: int = 0
    disk: int = 0
    cpu_remote: int = 0
    matched: int = 0


class Router:
    """The router's compatible HTTP API, as an existing client calls it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=10.0, trust_env=False)
        self._registered: list[dict[str, Any]] = []

    async def close(self) -> None:
        """Take back every registration: the system may give a publisher's port to another test's publisher."""
        for body in {(body["instance_id"], body["dp_rank"]): body for body in self._registered}.values():
            response = await self.http.post("/unregister", json=body)
            assert response.status_code == 200, response.text
        await self.http.aclose()

    async def register_engine(
        self, model: str, instance_id: str, publisher: EventPublisher, block_size: int, *, dp_rank: int = 0, **more: Any
    ) -> None:
        body = {
            "instance_id": instance_id,
            "type": "vLLM",
            "modelname": model,
            "block_size": block_size,
            "dp_rank": dp_rank,
            "medium_endpoints": {"npu": publisher.endpoint},
            "store_backend": "Memcache",
        }
        await self.register_body(body | more)
        await asyncio.wait_for(publisher.subscribed(), DEADLINE_SECONDS)

    async def register_pool(self, model: str, instance_id: str, publisher: EventPublisher, block_size: int) -> None:
        await self.register_pool_at(model, instance_id, publisher.endpoint, block_size)
        await asyncio.wait_for(publisher.subscribed(), DEADLINE_SECONDS)

    async def register_pool_at(self, model: str, instance_id: str, endpoint: str, block_size: int) -> None:
        body = {
            "instance_id": instance_id,
            "type": "vLLM",
            "modelname": model,
            "block_size": block_size,
            "dp_rank": 0,
            "endpoint": endpoint,
            "store_backend": "Memcache",
        }
        await self.register_body(body)

    async def query(self, model: str, block_size: int, tokens: Sequence[int], **more: Any) -> dict[str, Any]:
        """The default tenant's part of the answer."""
        body = {"model": model, "block_size": block_size, "token_ids": list(tokens)} | more
        response = await self.http.post("/query", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json().get("default", {})
        return answer

    async def counts(
        self, model: str, block_size: int, tokens: Sequence[int], instance_id: str, dp_rank: int = 0, **more: Any
    ) -> Counts:
        """What one worker can reuse."""
        instance = (await self.query(model, block_size, tokens, **more)).get(instance_id, {"DP": {}})
        entry = instance["DP"].get(str(dp_rank))
        if entry is None:
            return Counts()
        return Counts(
            npu=entry["npu_blocks"],
            cpu=entry["cpu_blocks"],
            disk=entry["disk_blocks"],
            cpu_remote=entry["cpu_remote_blocks"],
            matched=entry["matched_tokens"],
        )

    async def held(self, instance_id: str, dp_rank: int = 0) -> tuple[int, int, int]:
        """Blocks that the index knows of a worker, (npu, cpu, disk)."""
        workers = (await self.http.get("/workers")).json()["workers"]
        (instance,) = (worker for worker in workers if worker["instance_id"] == instance_id)
        endpoint = instance["endpoints"][str(dp_rank)]
        return endpoint["npu_blocks"], endpoint["cpu_blocks"], endpoint["disk_blocks"]

    async def register_body(self, body: dict[str, Any]) -> None:
        """Register, and unregister at the end."""
        response = await self.http.post("/register", json=body)
        assert response.status_code == 201, response.text
        self._registered.append(body)


class Pipeline:
    """Looks at every hop between a publisher and the index."""

    def __init__(self, client: Client, ingest_url: str, router_url: str) -> None:
        self.nats = client
        self._js = client.jetstream()
        self._ingest_url = ingest_url
        self._router_url = router_url
        self._http = httpx.AsyncClient(timeout=10.0, trust_env=False)

    @classmethod
    async def connect(cls, nats_url: str, ingest_url: str, router_url: str) -> "Pipeline":
        return cls(await nats.connect(nats_url), ingest_url, router_url)

    async def close(self) -> None:
        await self._http.aclose()
        await self.nats.close()

    async def drained(self, publisher: EventPublisher) -> None:
        """Return when the index has everything that the publisher has sent."""
        if publisher.last_sent is None:
            return

        async def ingested() -> bool:
            status = await self.publisher(publisher.endpoint)
            return status["last_seq"] == publisher.last_sent and status["messages"]["pending"] == 0

        await eventually(ingested, True)
        events = (await self._js.stream_info(EVENTS_STREAM)).state.last_seq

        async def matched() -> bool:
            try:
                info = await self._js.consumer_info(EVENTS_STREAM, MATCHER_CONSUMER)
            except NotFoundError:
                # A matcher that has just taken the lease makes its consumer anew.
                return False
            return info.ack_floor is not None and info.ack_floor.stream_seq >= events

        await eventually(matched, True)
        index = (await self._js.stream_info(INDEX_STREAM)).state.last_seq

        async def routed() -> bool:
            text = (await self._http.get(f"{self._router_url}/metrics")).text
            (line,) = (line for line in text.splitlines() if line.startswith(f"{ROUTER_POSITION} "))
            return float(line.split()[1]) >= index

        await eventually(routed, True)

    async def ingest(self, path: str) -> dict[str, Any]:
        """What ingest answers on a path."""
        return dict((await self._http.get(f"{self._ingest_url}{path}")).json())

    async def publisher(self, endpoint: str) -> dict[str, Any]:
        """What ingest says of one publisher."""
        publishers = (await self._http.get(f"{self._ingest_url}/publishers")).json()["publishers"]
        (status,) = (publisher for publisher in publishers if publisher["endpoint"] == endpoint)
        return dict(status)


class EngineStub:
    """Publishes what a test tells it to, as a vLLM engine would."""

    def __init__(self, context: zmq.asyncio.Context, host: str = "127.0.0.1", dp_rank: int = 0) -> None:
        self.publisher = EventPublisher(context, f"tcp://{host}:0", f"tcp://{host}:0")
        self._dp_rank = dp_rank

    def publish(self, *events: EngineEvent) -> None:
        self.publisher.publish(encode_engine_batch(time.time(), list(events), self._dp_rank))


class PoolStub:
    """Publishes what a test tells it to, as a memcache MetaService would."""

    def __init__(self, context: zmq.asyncio.Context, model: str, block_size: int) -> None:
        self._names = MetaServiceNames(model, block_size)
        self._event_ids = itertools.count()
        self.publisher = EventPublisher(context, "tcp://127.0.0.1:0", topic=self._names.topic)

    def publish(self, event_type: str, backend_id: str, *hashes: int, medium: str | None = "cpu") -> None:
        keys = [f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{value:016x}" for value in hashes] or [None]
        events = [PoolEvent(event_type, medium, backend_id, next(self._event_ids), key) for key in keys]  # type: ignore[arg-type]
        self.publisher.publish(encode_pool_batch(events, self._names, int(time.time() * 1000)))
