"""What the registry says of publishers: whose events may still be applied, and who is gone (pure).

Generations themselves are compared where the state is, in the store: what one leader decided, the next one repeats.
"""

from schemas.events import EventBatch, Holder, Location, Worker
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from services.matcher.state import group_key
from services.runtime.registry_store import Registry

PublisherKey = tuple[str, str, int]


class Fences:
    """The lowest generation that counts per publisher."""

    def __init__(self) -> None:
        self._lowest: dict[PublisherKey, int] = {}
        self._live: frozenset[PublisherKey] = frozenset()
        self._spaces: frozenset[tuple[str, str]] = frozenset()
        self._registry = Registry()

    def set_registry(self, registry: Registry) -> list[RetiredRecord]:
        """Take over a new view; the tombstones that are new in it."""
        known = {_tombstone_key(record) for record in self._registry.retired}
        self._registry = registry
        live: tuple[EngineRecord | PoolRecord, ...] = (*registry.engines.values(), *registry.pools.values())
        self._lowest = {(record.kind, record.instance_id, record.dp_rank): record.generation for record in live}
        self._live = frozenset(self._lowest)
        for record in registry.retired:
            self._lowest[record.retired_kind, record.instance_id, record.dp_rank] = record.generation + 1
        self._spaces = frozenset((record.model, record.tenant) for record in live)
        return [record for record in registry.retired if _tombstone_key(record) not in known]

    @property
    def retired(self) -> tuple[RetiredRecord, ...]:
        """Every tombstone of the registry."""
        return self._registry.retired

    @property
    def spaces(self) -> frozenset[tuple[str, str]]:
        """The spaces that registrations name."""
        return self._spaces

    def groups(self) -> set[str]:
        """Every publisher that the registry has, or the tombstone of (state.group_key)."""
        holders = [
            Worker(instance_id, dp_rank) if source == "engine" else Location(instance_id, "")
            for source, instance_id, dp_rank in self._lowest
        ]
        return {group_key(holder) for holder in holders}

    def lowest(self, batch: EventBatch) -> int:
        """The lowest generation that the registry admits of a message's publisher, 0 for one it does not know."""
        return self._lowest.get(_key_of(batch), 0)

    def knows(self, batch: EventBatch) -> bool:
        """Whether the registry has a message's publisher, or its tombstone."""
        return _key_of(batch) in self._lowest

    def has(self, key: PublisherKey) -> bool:
        """Whether a publisher is registered now."""
        return key in self._live

    def is_registered(self, batch: EventBatch) -> bool:
        """Whether a publisher comes from a registration, so that its name may become a metric label."""
        key = (batch.instance_id, batch.dp_rank)
        return key in self._registry.engines if batch.source == "engine" else batch.instance_id in self._registry.pools

    def is_configured(self, space: tuple[str, str]) -> bool:
        """Whether a space comes from a registration, so that its names may become metric labels."""
        return space in self._spaces


def _key_of(batch: EventBatch) -> PublisherKey:
    return batch.source, batch.instance_id, batch.dp_rank


def _tombstone_key(record: RetiredRecord) -> tuple[str, str, int, int]:
    return (record.retired_kind, record.instance_id, record.dp_rank, record.generation)


def holder_of_tombstone(record: RetiredRecord) -> Holder:
    """Whose blocks an unregistration takes away: a worker's, or those of all locations of a pool."""
    if record.retired_kind == "engine":
        return Worker(record.instance_id, record.dp_rank)
    return Location(record.instance_id, "")


def holder_of_publisher(batch: EventBatch) -> Holder:
    """What a publisher's new generation makes obsolete: its worker, or all locations of its pool."""
    if batch.source == "engine":
        return Worker(batch.instance_id, batch.dp_rank)
    return Location(batch.instance_id, "")
