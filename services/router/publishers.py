"""Publishers as the router sees them: generation fences and how far each has been followed (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from schemas.events import Holder, IndexGroup, Location
from schemas.registry import EngineRecord, PoolRecord
from services.runtime.registry_store import Registry

PublisherKey = tuple[str, str, int]
NO_GENERATION = 0


class Verdict(Enum):
    """What a group's generation means: it goes on, it begins a new life of its publisher, or it comes too late."""

    CURRENT = auto()
    NEW_LIFE = auto()
    DISCARDED = auto()


@dataclass(slots=True)
class Publisher:
    """generation: NO_GENERATION until one is known. last_seq: its own number of the last message applied, -1: none.
    last_event_at: when that message reached ingest, seconds since the epoch."""

    generation: int = NO_GENERATION
    last_seq: int = -1
    last_event_at: float = 0.0
    events: int = 0


class PublisherState(msgspec.Struct, frozen=True, array_like=True):
    """A Publisher with its key, as a snapshot carries it. registered: whether the registry named it then."""

    source: str
    instance_id: str
    dp_rank: int
    generation: int
    last_seq: int
    last_event_at: float
    events: int
    registered: bool


class Publishers:
    """Generations only rise; what is at or below a tombstone is discarded.

    Events without a generation (posted before their instance was registered) fence nothing off and survive the
    registration.
    """

    def __init__(self) -> None:
        self._known: dict[PublisherKey, Publisher] = {}
        self._retired: dict[PublisherKey, int] = {}
        self._pools: frozenset[str] = frozenset()
        self._retired_pools: frozenset[str] = frozenset()
        self._registered: frozenset[PublisherKey] = frozenset()

    def get(self, key: PublisherKey) -> Publisher:
        """What is known of a publisher; a blank one for an unknown key."""
        return self._known.get(key, Publisher())

    def is_registered(self, key: PublisherKey) -> bool:
        """Whether the registry names a publisher now."""
        return key in self._registered

    def retired_generation(self, key: PublisherKey) -> int:
        """The generation up to which everything is discarded; NO_GENERATION when nothing is."""
        return self._retired.get(key, NO_GENERATION)

    def admit(self, group: IndexGroup) -> Verdict:
        """Whether a group may be applied; raises the publisher's generation. After NEW_LIFE its holdings must
        go."""
        key = publisher_key(group)
        if group.generation <= self._retired.get(key, -1):
            return Verdict.DISCARDED
        publisher = self._known.setdefault(key, Publisher())
        if group.generation < publisher.generation:
            return Verdict.DISCARDED
        return Verdict.NEW_LIFE if self._raise(publisher, group.generation) else Verdict.CURRENT

    def is_current(self, group: IndexGroup) -> bool:
        """Whether a group that was admitted may go on (the registry may have changed meanwhile)."""
        key = publisher_key(group)
        return group.generation > self._retired.get(key, -1) and group.generation >= self.get(key).generation

    def may_change(self, holder: Holder, group: IndexGroup, admitted: bool) -> bool:
        """Whether an event of a group may change what this holder has. admitted: the group's own generation passed.

        What a publisher says of itself stands and falls with its generation. What it proved of others (an engine's
        content confirms pool locations) outlives it, and is void when those are gone.
        """
        if isinstance(holder, Location):
            if (group.source, group.instance_id) == ("pool", holder.pool_id):
                return admitted
            return holder.pool_id in self._pools or (admitted and holder.pool_id not in self._retired_pools)
        key = ("engine", holder.instance_id, holder.dp_rank)
        return admitted if key == publisher_key(group) else key not in self._retired

    def note(self, group: IndexGroup) -> None:
        """A group has been applied."""
        publisher = self._known.setdefault(publisher_key(group), Publisher())
        publisher.events += len(group.events)
        if group.source_sequence:
            publisher.last_seq = group.last_seq
            publisher.last_event_at = max(publisher.last_event_at, group.received_at)

    def set_registry(self, registry: Registry) -> list[PublisherKey]:
        """Take over a new view; the publishers whose holdings must go."""
        records: list[EngineRecord | PoolRecord] = [*registry.engines.values(), *registry.pools.values()]
        registered: dict[PublisherKey, EngineRecord | PoolRecord] = {
            (record.kind, record.instance_id, record.dp_rank): record for record in records
        }
        gone: list[PublisherKey] = list(self._registered - registered.keys())
        retired: dict[PublisherKey, int] = {
            (one.retired_kind, one.instance_id, one.dp_rank): one.generation for one in registry.retired
        }
        gone.extend(key for key, generation in retired.items() if generation > self._retired.get(key, -1))
        self._registered, self._retired = frozenset(registered), retired
        self._pools = frozenset(registry.pools)
        self._retired_pools = frozenset(instance_id for kind, instance_id, _ in retired if kind == "pool") - self._pools
        for key in gone:
            self._known.pop(key, None)
        for key, record in registered.items():
            if self._raise(self._known.setdefault(key, Publisher()), record.generation):
                gone.append(key)
        return gone

    def forget_unregistered(self) -> None:
        """Drop what is known of publishers that the registry does not name."""
        for key in self._known.keys() - self._registered:
            del self._known[key]

    def states(self) -> list[PublisherState]:
        """A copy of what is known, to be taken over by another process."""
        return [
            PublisherState(
                *key, one.generation, one.last_seq, one.last_event_at, one.events, registered=key in self._registered
            )
            for key, one in self._known.items()
        ]

    def take_over(self, states: Sequence[PublisherState]) -> None:
        """Know what another process knew. The registry is to be set again afterwards: it tells whose life is over."""
        self._known = {
            (one.source, one.instance_id, one.dp_rank): Publisher(
                one.generation, one.last_seq, one.last_event_at, one.events
            )
            for one in states
        }
        self._registered = frozenset((one.source, one.instance_id, one.dp_rank) for one in states if one.registered)
        self._retired = {}

    def _raise(self, publisher: Publisher, generation: int) -> bool:
        """Whether this ends a life of which something may be held."""
        if generation <= publisher.generation:
            return False
        new_life = publisher.generation != NO_GENERATION
        publisher.generation = generation
        if new_life:
            publisher.last_seq = -1
        return new_life


def publisher_key(group: IndexGroup) -> PublisherKey:
    """Source, instance and rank."""
    return group.source, group.instance_id, group.dp_rank


def same_space(record: EngineRecord | PoolRecord, space: tuple[str, str]) -> bool:
    """Whether a registration belongs to (model, tenant)."""
    return (record.model, record.tenant) == space


def spaces_of(records: Sequence[EngineRecord | PoolRecord]) -> set[tuple[str, str]]:
    """The (model, tenant) pairs that registrations name."""
    return {(record.model, record.tenant) for record in records}
