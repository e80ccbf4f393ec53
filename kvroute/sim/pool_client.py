"""An engine's connection to the simulated memcache pool: where its blocks lie, and putting them there."""

from collections.abc import Sequence
from typing import Any

import httpx

from kvroute.sim.pool_store import Placed


class PoolUnavailableError(ConnectionError):
    """The pool did not answer; the engine goes on without it."""


class PoolClient:
    """Talks to a simulated MetaService on behalf of the LocalService ``backend_id``, which it attaches."""

    def __init__(self, url: str, backend_id: str) -> None:
        self.backend_id = backend_id
        self._http = httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False)

    async def attach(self, cpu_blocks: int, disk_blocks: int) -> None:
        """Lend room to the pool. Raises PoolUnavailableError."""
        await self._post("/attach", {"cpu_keys": cpu_blocks, "disk_keys": disk_blocks})

    async def detach(self) -> None:
        """Take the room back; what lay there is lost. Raises PoolUnavailableError."""
        await self._post("/detach", {})

    async def find(self, keys: Sequence[str]) -> list[Placed | None]:
        """Where keys lie. Raises PoolUnavailableError."""
        places = await self._post("/find", {"keys": list(keys)})
        return [Placed(medium=place[0], backend_id=place[1]) if place else None for place in places]

    async def put(self, keys: Sequence[str]) -> list[bool]:
        """Store keys; True for those the pool did not have. Raises PoolUnavailableError."""
        return [bool(new) for new in await self._post("/put", {"keys": list(keys)})]

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, object]) -> list[Any]:
        try:
            response = await self._http.post(path, json=body | {"backend_id": self.backend_id})
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise PoolUnavailableError(f"{self._http.base_url} {path}: {error}") from error
        result = response.json()["result"]
        return result if isinstance(result, list) else []
