"""How a simulated engine or pool makes itself known to kvroute, and says goodbye."""

import asyncio
from typing import Any

import httpx

from kvroute.sim.engine import SimulatedEngine
from kvroute.sim.metaservice import SimulatedMetaService

ENGINE_TYPE = "vLLM"
MEMCACHE = "Memcache"
NO_POOL = "None"
RETRY_SECONDS = 1.0


def engine_registrations(engine: SimulatedEngine) -> list[dict[str, Any]]:
    """One body of POST /register for every DP rank."""
    settings = engine.settings
    return [
        {
            "instance_id": settings.name,
            "type": ENGINE_TYPE,
            "modelname": settings.model,
            "block_size": settings.rank.block_size,
            "dp_rank": server.dp_rank,
            "medium_endpoints": {"npu": engine.endpoint(server.dp_rank)},
            "replay_endpoint": engine.replay_endpoint(server.dp_rank),
            "store_backend": MEMCACHE if settings.pool_url else NO_POOL,
            "url": engine.url,
        }
        for server in engine.ranks
    ]


def pool_registration(instance_id: str, pool: SimulatedMetaService, endpoint: str | None = None) -> dict[str, Any]:
    """The body of POST /register for a pool; endpoint: as others reach it."""
    return {
        "instance_id": instance_id,
        "type": ENGINE_TYPE,
        "modelname": pool.names.model_name,
        "block_size": pool.names.block_size,
        "dp_rank": 0,
        "endpoint": endpoint or pool.endpoint,
        "store_backend": MEMCACHE,
    }


async def register(router_url: str, bodies: list[dict[str, Any]], *, retry: bool = True) -> None:
    """Send registrations; while the router is away, try again (``retry``), else raise httpx.HTTPError.

    Raises ValueError with the router's explanation when a body is refused.
    """
    async with httpx.AsyncClient(base_url=router_url, timeout=10.0, trust_env=False) as client:
        for body in bodies:
            while True:
                try:
                    response = await client.post("/register", json=body)
                except httpx.HTTPError:
                    if not retry:
                        raise
                else:
                    if response.status_code < 500:
                        break
                    if not retry:
                        response.raise_for_status()
                await asyncio.sleep(RETRY_SECONDS)
            if response.status_code >= 400:
                raise ValueError(f"{router_url}/register refused {body['instance_id']}: {response.text}")


async def unregister(router_url: str, bodies: list[dict[str, Any]]) -> None:
    """Take registrations back. Raises httpx.HTTPError when the router is away."""
    fields = ("instance_id", "type", "modelname", "block_size", "dp_rank")
    async with httpx.AsyncClient(base_url=router_url, timeout=5.0, trust_env=False) as client:
        for body in bodies:
            response = await client.post("/unregister", json={field: body[field] for field in fields})
            if response.status_code != 404:
                response.raise_for_status()
