"""Which messages may still be applied: events of retired generations and of unregistered publishers may not (pure)."""

from schemas.events import EventBatch, Holder, Location, Worker
from schemas.registry import StoreBackend
from services.runtime.registry_store import Registry

PublisherKey = tuple[str, str, int]


class Fences:
    """The highest generation seen per publisher, and what the registry says."""

    def __init__(self) -> None:
        self._generations: dict[PublisherKey, int] = {}
        self._retired: dict[PublisherKey, int] = {}
        self._registry = Registry()

    def set_registry(self, registry: Registry) -> list[Holder]:
        """Take over a new view; the holders (worker, or pool as a location without backend) that are gone by it."""
        before, self._registry = self._registry, registry
        for record in registry.retired:
            key = (record.retired_kind, record.instance_id, record.dp_rank)
            self._retired[key] = max(self._retired.get(key, 0), record.generation)
        gone: list[Holder] = [Worker(*key) for key in before.engines if key not in registry.engines]
        gone.extend(Location(pool_id, "") for pool_id in before.pools if pool_id not in registry.pools)
        return gone

    def admit(self, batch: EventBatch) -> tuple[bool, bool]:
        """(whether the message may be applied, whether it starts a new generation)."""
        key = (batch.source, batch.instance_id, batch.dp_rank)
        if batch.generation <= self._retired.get(key, -1):
            return False, False
        current = self._generations.get(key)
        if current is not None and batch.generation < current:
            return False, False
        self._generations[key] = batch.generation
        return True, current is not None and batch.generation > current

    def remembers(self, batch: EventBatch) -> bool:
        """Whether content of this engine may be needed for pool events (unknown engines: yes)."""
        if batch.own_tiers:
            return True
        record = self._registry.engines.get((batch.instance_id, batch.dp_rank))
        return record is None or record.store_backend != StoreBackend.NONE

    def is_configured(self, model: str) -> bool:
        """Whether a model comes from a registration, so that it may become a metric label."""
        records = (*self._registry.engines.values(), *self._registry.pools.values())
        return any(record.model == model for record in records)


def holder_of_publisher(batch: EventBatch) -> Holder:
    """What a publisher's new generation makes obsolete: its worker, or all locations of its pool."""
    if batch.source == "engine":
        return Worker(batch.instance_id, batch.dp_rank)
    return Location(batch.instance_id, "")
