"""One matcher at a time: a lease in Redis with a rising epoch (docs/adr/0005).

The epoch goes into every state change; a leader that was paused and came back cannot write past its successor.
"""

import asyncio
import uuid
from typing import Any

from redis.exceptions import RedisError

from services.runtime.logging import get_logger

_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""

log = get_logger("lease")


class Lease:
    """Held by at most one process. All keys share one hash tag."""

    def __init__(self, client: Any, key_prefix: str, ttl: float) -> None:
        self._client = client
        self._ttl_ms = max(1, round(ttl * 1000))
        self._lease_key = f"{key_prefix}:matcher:{{leader}}:lease"
        self._epoch_key = f"{key_prefix}:matcher:{{leader}}:epoch"
        self._position_key = f"{key_prefix}:matcher:{{leader}}:position"
        self._owner = uuid.uuid4().hex
        self.epoch = 0

    async def acquire(self) -> bool:
        """Try once. Raises RedisError when Redis is away."""
        taken = await self._client.set(self._lease_key, self._owner, px=self._ttl_ms, nx=True)
        if not taken:
            return False
        self.epoch = int(await self._client.incr(self._epoch_key))
        return True

    async def keep(self) -> str:
        """Renew until the lease is lost; the reason. Returns early enough that no other can hold it meanwhile."""
        loop = asyncio.get_running_loop()
        valid_until = loop.time() + self._ttl_ms / 1000
        while True:
            await asyncio.sleep(self._ttl_ms / 4000)
            asked = loop.time()
            try:
                renewed = await self._client.eval(_RENEW, 1, self._lease_key, self._owner, self._ttl_ms)
            except (RedisError, OSError, TimeoutError) as error:
                if loop.time() > valid_until - self._ttl_ms / 4000:
                    return f"the lease could not be renewed: {error}"
                continue
            if not renewed:
                return "another matcher holds the lease"
            valid_until = asked + self._ttl_ms / 1000

    async def release(self) -> None:
        """Give it up so that another takes over at once; does nothing when it is not held."""
        try:
            await self._client.eval(_RELEASE, 1, self._lease_key, self._owner)
        except (RedisError, OSError, TimeoutError) as error:
            log.info("lease_not_released", error=str(error))

    async def position(self, stream_created: int) -> int | None:
        """The last stream sequence that is completely done, None when unknown or of another stream."""
        text = await self._client.get(self._position_key)
        created, _, sequence = (text or b"").decode().partition(":")
        return int(sequence) if sequence and created == str(stream_created) else None

    async def set_position(self, stream_created: int, sequence: int) -> None:
        """Remember that everything up to `sequence` is done."""
        await self._client.set(self._position_key, f"{stream_created}:{sequence}")
