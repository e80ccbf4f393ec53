"""An engine's connection to the simulated memcache pool: where its blocks lie, and putting them there."""

from collections.abc import Sequence
from typing import Any

import httpx

from kvroute.sim.pool_store import Placed

UNKNOWN_LOCATION = 404


class PoolUnavailableError(ConnectionError):
    """The pool did not answer; the engine goes on without it."""


class PoolClient:
    """Talks to a simulated MetaService on behalf of the LocalService ``backend_id``, which lends it room for blocks."""

    def __init__(self, url: str, backend_id: str, cpu_blocks: int, disk_blocks: int = 0) -> None:
        self.backend_id = backend_id
        self._room = {"cpu_keys": cpu_blocks, "disk_keys": disk_blocks}
        self._http = httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False)

    async def attach(self) -> None:
        """Lend room to the pool. Raises PoolUnavailableError."""
        await self._post("/attach", self._room)

    async def detach(self) -> None:
        """Take the room back; what lay there is lost. Raises PoolUnavailableError."""
        await self._post("/detach", {})

    async def find(self, keys: Sequence[str]) -> list[Placed | None]:
        """Where keys lie. Raises PoolUnavailableError."""
        places = await self._post("/find", {"keys": list(keys)})
        return [Placed(medium=place[0], backend_id=place[1]) if place else None for place in places]

    async def put(self, keys: Sequence[str]) -> list[bool]:
        """Store keys; True for those the pool did not have. Attaches again after the pool restarted.

        Raises PoolUnavailableError.
        """
        return [bool(new) for new in await self._post("/put", {"keys": list(keys)}, attach_when_unknown=True)]

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any], *, attach_when_unknown: bool = False) -> list[Any]:
        try:
            response = await self._http.post(path, json=body | {"backend_id": self.backend_id})
            if attach_when_unknown and response.status_code == UNKNOWN_LOCATION:
                await self.attach()
                return await self._post(path, body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise PoolUnavailableError(f"{self._http.base_url} {path}: {error}") from error
        result = response.json()["result"]
        return result if isinstance(result, list) else []
