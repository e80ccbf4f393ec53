"""Whose events are taken: a publisher must be registered, or have been (then its tombstone decides by generation).

The registry watch may lag behind the events of a publisher that has just been registered, so an unknown one is looked
up in the bucket itself before anything of it is discarded.
"""

from nats.js import JetStreamContext

from schemas.events import EventBatch
from schemas.subjects import engine_key, pool_key
from services.matcher.fences import Fences
from services.runtime.registry_store import RegistryStore, RegistryWatch

MAX_REMEMBERED = 10_000
WATCH_SECONDS = 5.0


class Registrations:
    """Decides for single messages."""

    def __init__(self, js: JetStreamContext, fences: Fences, watch: RegistryWatch) -> None:
        self._store = RegistryStore(js)
        self._fences = fences
        self._watch = watch
        self._strangers: set[tuple[str, str, int, int]] = set()

    async def know(self, batch: EventBatch) -> bool:
        """Whether the registry knows a message's publisher. Raises nats.errors.Error when it cannot be asked."""
        if self._fences.knows(batch):
            return True
        stranger = (batch.source, batch.instance_id, batch.dp_rank, batch.generation)
        if stranger in self._strangers:
            # It was registered before it could publish under this generation, and is gone without a trace since.
            return False
        key = pool_key(batch.instance_id) if batch.source == "pool" else engine_key(batch.instance_id, batch.dp_rank)
        record, revision = await self._store.get(key)
        if record is not None:
            await self._watch.wait_for_revision(revision, WATCH_SECONDS)
            return True
        if len(self._strangers) >= MAX_REMEMBERED:
            self._strangers.clear()
        self._strangers.add(stranger)
        return False
