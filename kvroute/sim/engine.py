"""A whole simulated engine: its DP ranks, their event publishers and its HTTP interface."""

import contextlib
import socket
from dataclasses import dataclass, field

import zmq.asyncio

from kvroute.sim.engine_http import engine_app
from kvroute.sim.engine_metrics import EngineMetrics
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.fault_names import Fault
from kvroute.sim.faults import RankFaults
from kvroute.sim.pool_client import PoolClient, PoolUnavailableError
from kvroute.sim.publisher import DEFAULT_BUFFER_STEPS, DEFAULT_TOPIC, EventPublisher
from kvroute.sim.rank_server import FirstToken, Prompt, RankServer
from kvroute.sim.registration import ENGINE_TYPE, MEMCACHE, NO_POOL, Registration
from kvroute.sim.timing import Speed
from services.runtime.http_server import HttpServer

WILDCARDS = ("0.0.0.0", "::", "*", "")


def own_address(host: str) -> str:
    """The address under which others reach what listens on ``host``."""
    return socket.gethostbyname(socket.gethostname()) if host in WILDCARDS else host


@dataclass(frozen=True)
class EngineSettings:
    """host: address to bind; advertise_host: the one others reach it at (default: host, or this machine's address).

    events_port / replay_port: of DP rank 0, each rank adds its number; 0 takes free ports. pool_url: a simulated
    MetaService; pool_cpu_blocks / pool_disk_blocks: the room this engine's LocalService lends to it.
    """

    name: str
    model: str
    rank: RankSpec
    dp_size: int = 1
    host: str = "127.0.0.1"
    advertise_host: str | None = None
    port: int = 0
    events_port: int = 0
    replay_port: int = 0
    speed: Speed = field(default_factory=Speed)
    pool_url: str | None = None
    pool_cpu_blocks: int = 0
    pool_disk_blocks: int = 0
    topic: bytes = DEFAULT_TOPIC
    faults: tuple[Fault, ...] = ()

    @property
    def address(self) -> str:
        """What others connect to, and the backend_id of the engine's LocalService."""
        return self.advertise_host or own_address(self.host)


class SimulatedEngine:
    """Serve with ``start`` and ``stop``; ``ranks`` show what each DP rank holds."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.metrics = EngineMetrics(settings.model)
        self.ranks: list[RankServer] = []
        self._context = zmq.asyncio.Context()
        self._pool = (
            PoolClient(settings.pool_url, settings.address, settings.pool_cpu_blocks, settings.pool_disk_blocks)
            if settings.pool_url
            else None
        )
        self._server = HttpServer(engine_app(self), settings.host, settings.port)

    @property
    def url(self) -> str:
        """Base of the HTTP interface, as others reach it."""
        return f"http://{_in_url(self.settings.address)}:{self._server.port}"

    def endpoint(self, dp_rank: int) -> str:
        """Where a rank's events are published, as others reach it."""
        return f"tcp://{_in_url(self.settings.address)}:{_port(self.ranks[dp_rank].publisher.endpoint)}"

    def replay_endpoint(self, dp_rank: int) -> str:
        """Where a rank's events can be had again, as others reach it."""
        return f"tcp://{_in_url(self.settings.address)}:{_port(self.ranks[dp_rank].publisher.replay_endpoint or '')}"

    def registrations(self) -> list[Registration]:
        """Bodies of POST /register, one for every DP rank."""
        settings = self.settings
        return [
            {
                "instance_id": settings.name,
                "type": ENGINE_TYPE,
                "modelname": settings.model,
                "block_size": settings.rank.block_size,
                "dp_rank": server.dp_rank,
                "medium_endpoints": {"npu": self.endpoint(server.dp_rank)},
                "replay_endpoint": self.replay_endpoint(server.dp_rank),
                "store_backend": MEMCACHE if settings.pool_url else NO_POOL,
                "url": self.url,
                # A full report repeats stores that are removed once: they must not add up.
                "counted": not any(fault.name == "reannounce" for fault in settings.faults),
            }
            for server in self.ranks
        ]

    async def start(self) -> None:
        """Bind all ports and attach to the pool (or later, with the first put). Raises OSError naming a taken port."""
        settings = self.settings
        for dp_rank in range(settings.dp_size):
            faults = RankFaults(settings.faults, seed=dp_rank + 1)
            publisher = EventPublisher(
                self._context,
                _bind_address(settings.host, settings.events_port, dp_rank),
                _bind_address(settings.host, settings.replay_port, dp_rank),
                topic=settings.topic,
                buffer_steps=faults.buffer_steps or DEFAULT_BUFFER_STEPS,
                wire_filter=faults.wire,
                replay_manner=faults.replay_manner,
            )
            self.ranks.append(
                RankServer(
                    dp_rank,
                    settings.model,
                    settings.rank,
                    settings.speed,
                    publisher,
                    self._pool,
                    self._count_served,
                    faults,
                )
            )
        await self._server.start()
        if self._pool:
            with contextlib.suppress(PoolUnavailableError):
                await self._pool.attach()

    async def stop(self) -> None:
        """Release everything; the pool loses what lay at this engine."""
        await self._server.stop(grace=1.0)
        for server in self.ranks:
            await server.close()
        if self._pool:
            with contextlib.suppress(PoolUnavailableError):
                await self._pool.detach()
            await self._pool.close()
        self._context.destroy(linger=100)

    def _count_served(self, dp_rank: int, prompt: Prompt, first: FirstToken) -> None:
        self.metrics.served(dp_rank, prompt, first, self.settings.rank.block_size)


def _bind_address(host: str, first_port: int, dp_rank: int) -> str:
    name = "*" if host in WILDCARDS else _in_url(host)
    return f"tcp://{name}:{first_port + dp_rank if first_port else 0}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
