"""The cluster a demo load runs against, over HTTP alone: what it holds, warming it up, emptying it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from kvroute.demo.placement import Worker
from kvroute.sim.engine_http import DP_RANK_HEADER

POLL_SECONDS = 0.1
WARM_UP_ATTEMPT_SECONDS = 2.0
RESET_SECONDS = 20.0


class ClusterError(RuntimeError):
    """The cluster does not do what the demo needs; the text says what was waited for."""


@dataclass(frozen=True)
class Cluster:
    """engines: HTTP base by instance_id, all with dp_size ranks. pool_url: a simulated MetaService, or None."""

    router_url: str
    engines: Mapping[str, str]
    dp_size: int
    model: str
    block_size: int
    pool_url: str | None = None

    @property
    def workers(self) -> list[Worker]:
        """Every DP rank, alternating between engines."""
        return [Worker(name, rank) for rank in range(self.dp_size) for name in self.engines]


@dataclass(frozen=True)
class Holdings:
    """Blocks the router's index knows: on the device by worker, and in the pool."""

    npu: Mapping[Worker, int]
    pool_cpu: int
    pool_disk: int

    @property
    def empty(self) -> bool:
        """Whether nothing is held anywhere."""
        return not any(self.npu.values()) and not self.pool_cpu and not self.pool_disk


class ClusterClient:
    """Looks after a cluster. Raises ClusterError when it does not follow, httpx.HTTPError when it is away."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._http = httpx.AsyncClient(timeout=30.0, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def wait_until_reachable(self, deadline: float) -> None:
        """Wait until router and engines answer and every rank is registered."""
        ranks = {(worker.instance_id, worker.dp_rank) for worker in self.cluster.workers}

        async def reachable() -> bool:
            try:
                for url in self.cluster.engines.values():
                    (await self._http.get(f"{url}/health")).raise_for_status()
                known = {(worker.instance_id, worker.dp_rank) for worker in (await self.holdings()).npu}
            except httpx.HTTPError:
                return False
            return ranks <= known

        await wait_until(reachable, deadline, "the router and every engine")

    async def holdings(self) -> Holdings:
        """What lies where, from the router's /workers."""
        response = await self._http.get(f"{self.cluster.router_url}/workers")
        response.raise_for_status()
        return read_holdings(response.json(), self.cluster)

    async def warm_up(self, deadline: float) -> None:
        """Send small prompts until the index has seen blocks of every rank and of the pool, then empty all caches.

        What an engine publishes before ingest listens to it is lost, so the first prompts may have no effect.
        """
        attempt = 0
        give_up = time.monotonic() + deadline
        missing = self.cluster.workers
        while missing:
            attempt += 1
            prompts = [[attempt * 1000 + number] * (self.cluster.block_size + 1) for number in range(len(missing))]
            await asyncio.gather(*map(self._prompt, missing, prompts))
            missing = await self._wait_for_blocks(min(give_up, time.monotonic() + WARM_UP_ATTEMPT_SECONDS))
            if missing and time.monotonic() >= give_up:
                raise ClusterError(f"no block of {', '.join(map(str, missing))} reached the router in {deadline:.0f} s")
        await self.reset()

    async def reset(self) -> None:
        """Empty every device cache and the pool, and wait until the index has followed."""
        cluster = self.cluster
        for url in cluster.engines.values():
            (await self._http.post(f"{url}/reset_prefix_cache")).raise_for_status()
        # An engine tells its reset with its next step: a prompt too short for a block brings one about.
        await asyncio.gather(*(self._prompt(worker, [1]) for worker in cluster.workers))
        if cluster.pool_url:
            (await self._http.post(f"{cluster.pool_url}/clear", json={})).raise_for_status()
        await wait_until(self._is_empty, RESET_SECONDS, "the index to follow an emptied cluster")

    async def _is_empty(self) -> bool:
        return (await self.holdings()).empty

    async def _wait_for_blocks(self, deadline: float) -> list[Worker]:
        """Workers of which the index still knows nothing at the deadline; all of them while the pool is missing."""
        while True:
            holdings = await self.holdings()
            missing = [worker for worker in self.cluster.workers if not holdings.npu.get(worker)]
            if self.cluster.pool_url and not missing and not holdings.pool_cpu:
                missing = self.cluster.workers
            if not missing or time.monotonic() >= deadline:
                return missing
            await asyncio.sleep(POLL_SECONDS)

    async def _prompt(self, worker: Worker, tokens: list[int]) -> None:
        body = {"model": self.cluster.model, "prompt": tokens, "max_tokens": 2}
        url = f"{self.cluster.engines[worker.instance_id]}/v1/completions"
        response = await self._http.post(url, json=body, headers={DP_RANK_HEADER: str(worker.dp_rank)})
        response.raise_for_status()


def read_holdings(workers_answer: Mapping[str, Any], cluster: Cluster) -> Holdings:
    """The router's /workers answer, as far as it concerns a cluster."""
    npu: dict[Worker, int] = {}
    pool_cpu = pool_disk = 0
    for instance in workers_answer["workers"]:
        for rank, endpoint in instance["endpoints"].items():
            if instance["instance_id"] in cluster.engines:
                npu[Worker(instance["instance_id"], int(rank))] = endpoint["npu_blocks"]
            elif instance["kind"] == "pool" and instance["model_name"] == cluster.model:
                pool_cpu += endpoint["cpu_blocks"]
                pool_disk += endpoint["disk_blocks"]
    return Holdings(npu, pool_cpu, pool_disk)


async def wait_until(condition: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
    """Raises ClusterError when the condition does not hold in time."""
    give_up = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() >= give_up:
            raise ClusterError(f"waited {seconds:.0f} s for {what}")
        await asyncio.sleep(POLL_SECONDS)
