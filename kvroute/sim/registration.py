"""How a simulated engine or pool makes itself known to kvroute's router, and says goodbye."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

ENGINE_TYPE = "vLLM"
MEMCACHE = "Memcache"
NO_POOL = "None"
RETRY_SECONDS = 1.0

Registration = dict[str, Any]


async def register(router_url: str, bodies: list[Registration], say: Callable[[str], None]) -> None:
    """Send registrations, waiting for a router that is not there yet.

    Raises ValueError with the router's explanation when it refuses one.
    """
    async with httpx.AsyncClient(base_url=router_url, timeout=10.0, trust_env=False) as client:
        for body in bodies:
            response = await _post_until_answered(client, body, say)
            if response.is_error:
                raise ValueError(f"{router_url}/register refused {body['instance_id']}: {response.text}")


async def unregister(router_url: str, bodies: list[Registration]) -> None:
    """Take registrations back. Raises httpx.HTTPError when the router is away."""
    fields = ("instance_id", "type", "modelname", "block_size", "dp_rank")
    async with httpx.AsyncClient(base_url=router_url, timeout=5.0, trust_env=False) as client:
        for body in bodies:
            response = await client.post("/unregister", json={field: body[field] for field in fields})
            if response.status_code != httpx.codes.NOT_FOUND:
                response.raise_for_status()


async def _post_until_answered(
    client: httpx.AsyncClient, body: Registration, say: Callable[[str], None]
) -> httpx.Response:
    told = ""
    while True:
        try:
            response = await client.post("/register", json=body)
        except httpx.TransportError as error:
            problem = str(error) or type(error).__name__
        else:
            if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                return response
            problem = response.text
        if problem != told:
            say(f"waiting for the router at {client.base_url}: {problem}")
            told = problem
        await asyncio.sleep(RETRY_SECONDS)
