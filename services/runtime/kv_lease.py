"""A lease in NATS KV: of several replicas one does a job, and another takes over when it is gone.

Nobody's clock is compared with anybody else's: a lease counts as given up when its record has not changed for ``ttl``
seconds of the watcher's own time. Every change is compare-and-set on the record's revision.
"""

import asyncio
import contextlib
import time
import uuid

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from schemas.subjects import LEASE_BUCKET
from services.runtime.logging import get_logger
from services.runtime.tasks import end_tasks

FREE = b""

log = get_logger("lease")


class KvLease:
    """One replica's view of a lease. ttl: seconds after which a silent owner is replaced."""

    def __init__(self, js: JetStreamContext, name: str, ttl: float) -> None:
        self._js = js
        self._name = name
        self._ttl = ttl
        self._owner = uuid.uuid4().hex.encode()
        self._bucket: KeyValue | None = None
        self._revision = 0
        self._seen = (-1, 0.0)
        self._valid_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def held(self) -> bool:
        """Whether this replica may work; false early enough that no other one can hold the lease meanwhile."""
        return time.monotonic() < self._valid_until

    def start(self) -> None:
        """Begin to try for the lease and to renew it, until `stop`."""
        self._task = asyncio.create_task(self._keep(), name=f"lease-{self._name}")

    async def stop(self) -> None:
        """Give the lease up, so that another takes over at once. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await end_tasks([task])
        if self.held and self._bucket is not None:
            self._valid_until = 0.0
            with contextlib.suppress(NatsError, TimeoutError, OSError):
                await self._bucket.update(self._name, FREE, last=self._revision)

    async def wait(self) -> None:
        """Return when the lease is held."""
        while not self.held:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._ttl)

    async def _keep(self) -> None:
        while True:
            before = self.held
            try:
                await self._attempt()
            except KeyWrongLastSequenceError:
                self._valid_until = 0.0
            except (NatsError, TimeoutError, OSError) as error:
                log.debug("lease_not_renewed", lease=self._name, error=str(error) or type(error).__name__)
            if self.held != before:
                log.info("lease_taken" if self.held else "lease_lost", lease=self._name)
            self._changed.set()
            await asyncio.sleep(self._ttl / 4)

    async def _attempt(self) -> None:
        """Renew, or take what is free. Raises nats.errors.Error."""
        if self._bucket is None:
            self._bucket = await self._js.key_value(LEASE_BUCKET)
        asked = time.monotonic()
        if self.held:
            revision = await self._bucket.update(self._name, self._owner, last=self._revision)
        else:
            try:
                entry = await self._bucket.get(self._name)
            except KeyNotFoundError:
                revision = await self._bucket.create(self._name, self._owner)
            else:
                if entry.revision != self._seen[0]:
                    self._seen = (entry.revision or 0, asked)
                if entry.value and asked - self._seen[1] < self._ttl:
                    return
                revision = await self._bucket.update(self._name, self._owner, last=entry.revision)
        self._revision = revision
        self._valid_until = asked + self._ttl * 3 / 4
