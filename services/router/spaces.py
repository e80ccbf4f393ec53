"""Applies index batches to the spaces: interned holders, generation fences, skipping of repeats (pure).

A space is (model, tenant) with an index of its own. Holders and domains are small integers shared by all spaces.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from schemas.blocks import Tier
from schemas.events import (
    Holder,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexRemoved,
    IndexStored,
    Location,
    Worker,
)
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from services.router.index.port import CPU, DISK, NPU, TIERS, Candidate, PrefixIndex
from services.runtime.registry_store import Registry

TIER_NUMBERS = {Tier.NPU: NPU, Tier.CPU: CPU, Tier.DISK: DISK}
SpaceKey = tuple[str, str]
PublisherKey = tuple[str, str, int]


@dataclass(slots=True)
class ApplyCounts:
    """What became of events, by reason; every event is in exactly one of them."""

    applied: int = 0
    retired_generation: int = 0
    repeated_group: int = 0
    refused: int = 0


@dataclass(slots=True)
class Space:
    """One index and how far it has been filled. candidates: rebuilt when registry or locations change."""

    index: PrefixIndex
    last_sequence: tuple[int, int] = (0, 0)
    source_epoch: int = 0
    locations: dict[int, Location] = field(default_factory=dict)
    engines: tuple[EngineRecord, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    pool_holders: frozenset[int] = frozenset()
    stale: bool = True


class Spaces:
    """All spaces of a router. Not for concurrent use; `apply` can be interrupted between events."""

    def __init__(self, make_index: Callable[[], PrefixIndex], max_spaces: int = 1024) -> None:
        self._make_index = make_index
        self._max_spaces = max_spaces
        self._ids: dict[Holder | str, int] = {}
        self._numbers = count(1)
        self._generations: dict[PublisherKey, int] = {}
        self._retired: dict[PublisherKey, int] = {}
        self.spaces: dict[SpaceKey, Space] = {}
        self.registry = Registry()
        self.counts = ApplyCounts()

    def find(self, model: str, tenant: str) -> Space | None:
        """The space of a query with its candidates up to date, None when neither events nor registrations made one."""
        space = self.spaces.get((model, tenant))
        if space is not None and space.stale:
            self._refresh(space, model, tenant)
        return space

    def apply(self, batch: IndexBatch) -> Iterator[None]:
        """Apply a batch, yielding between events so that the caller can let queries in."""
        space = self._open(batch.model, batch.tenant)
        if space is None:
            self.counts.refused += sum(len(group.events) for group in batch.groups)
            return
        for group in batch.groups:
            if group.source_sequence and not self._is_next(space, batch.source_epoch, group):
                self.counts.repeated_group += len(group.events)
                continue
            admitted = self._admit(group)
            for event in group.events:
                # What a retired engine said of itself is void; what it proved of a pool still is so.
                if not admitted and not self._outlives(group, event):
                    self.counts.retired_generation += 1
                    continue
                self._apply_event(space, event)
                self.counts.applied += 1
                yield

    def set_registry(self, registry: Registry) -> None:
        """Take over a new view: clear what is gone, fence what was retired, refresh candidates."""
        before, self.registry = self.registry, registry
        for record in registry.retired:
            self._retire(record)
        for key, engine in before.engines.items():
            if key not in registry.engines:
                self._clear_worker(Worker(engine.instance_id, engine.dp_rank))
        for pool_id in before.pools.keys() - registry.pools.keys():
            self._clear_pool(pool_id)
        live: list[EngineRecord | PoolRecord] = [*registry.engines.values(), *registry.pools.values()]
        for current in live:
            self._open(current.model, current.tenant)
            self._raise_generation((current.kind, current.instance_id, current.dp_rank), current.generation)
        for space in self.spaces.values():
            space.stale = True

    def holder_id(self, holder: Holder) -> int:
        """The small integer of a holder, new for one not seen before."""
        return self._id(holder)

    def reset(self) -> None:
        """Forget all blocks and positions (the stream was lost); registrations stay."""
        self.spaces.clear()
        self._generations.clear()
        registry, self.registry = self.registry, Registry()
        self.set_registry(registry)

    def _id(self, name: Holder | str) -> int:
        number = self._ids.get(name)
        if number is None:
            number = self._ids[name] = next(self._numbers)
        return number

    def _domain(self, holder: Holder) -> int:
        return self._id(f"pool:{holder.pool_id}") if isinstance(holder, Location) else self._id(holder)

    def _open(self, model: str, tenant: str) -> Space | None:
        space = self.spaces.get((model, tenant))
        if space is None:
            if len(self.spaces) >= self._max_spaces:
                return None
            space = self.spaces[model, tenant] = Space(self._make_index())
        return space

    def _is_next(self, space: Space, epoch: int, group: IndexGroup) -> bool:
        """Whether a group lies behind everything applied; a younger stream counts from its own beginning."""
        if epoch > space.source_epoch:
            space.source_epoch = epoch
            space.last_sequence = (0, 0)
        elif epoch and epoch < space.source_epoch:
            return False
        position = (group.source_sequence, group.part)
        if position <= space.last_sequence:
            return False
        space.last_sequence = position
        return True

    def _outlives(self, group: IndexGroup, event: IndexEvent) -> bool:
        holder = event.holder
        return group.source == "engine" and isinstance(holder, Location) and holder.pool_id in self.registry.pools

    def _admit(self, group: IndexGroup) -> bool:
        key = (group.source, group.instance_id, group.dp_rank)
        retired = self._retired.get(key)
        if retired is not None and group.generation <= retired:
            return False
        if group.generation < self._generations.get(key, 0):
            return False
        self._raise_generation(key, group.generation)
        return True

    def _raise_generation(self, key: PublisherKey, generation: int) -> None:
        current = self._generations.get(key)
        if current is not None and generation <= current:
            return
        self._generations[key] = generation
        if current is None:
            return
        source, instance_id, dp_rank = key
        if source == "engine":
            self._clear_worker(Worker(instance_id, dp_rank))
        else:
            self._clear_pool(instance_id)

    def _retire(self, record: RetiredRecord) -> None:
        key = (record.retired_kind, record.instance_id, record.dp_rank)
        if self._retired.get(key, 0) >= record.generation:
            return
        self._retired[key] = record.generation
        if record.retired_kind == "engine":
            self._clear_worker(Worker(record.instance_id, record.dp_rank))
        else:
            self._clear_pool(record.instance_id)

    def _clear_worker(self, worker: Worker) -> None:
        holder = self._ids.get(worker)
        if holder is not None:
            for space in self.spaces.values():
                space.index.cleared(holder, TIERS)

    def _clear_pool(self, pool_id: str) -> None:
        for space in self.spaces.values():
            for holder, location in space.locations.items():
                if location.pool_id == pool_id:
                    space.index.cleared(holder, TIERS)

    def _apply_event(self, space: Space, event: IndexEvent) -> None:
        if isinstance(event, IndexStored):
            self._store(space, event)
        elif isinstance(event, IndexRemoved):
            holder = self._id(event.holder)
            space.index.removed(holder, TIER_NUMBERS[event.tier], self._domain(event.holder), event.engine_hashes)
        else:
            self._clear(space, event)

    def _store(self, space: Space, event: IndexStored) -> None:
        holder = self._id(event.holder)
        if isinstance(event.holder, Location) and holder not in space.locations:
            space.locations[holder] = event.holder
            space.stale = True
        domain = self._domain(event.holder)
        space.index.stored(
            holder,
            TIER_NUMBERS[event.tier],
            domain,
            event.engine_hashes,
            event.parent,
            event.content_hashes,
            event.root,
            domain if event.teacher is None else self._id(event.teacher),
            event.counted,
        )

    def _clear(self, space: Space, event: IndexCleared) -> None:
        tiers = [TIER_NUMBERS[tier] for tier in event.tiers]
        if isinstance(event.holder, Location) and not event.holder.backend_id:
            for holder, location in space.locations.items():
                if location.pool_id == event.holder.pool_id:
                    space.index.cleared(holder, tiers)
        else:
            space.index.cleared(self._id(event.holder), tiers)

    def _refresh(self, space: Space, model: str, tenant: str) -> None:
        space.stale = False
        space.engines = tuple(
            engine
            for _, engine in sorted(self.registry.engines.items())
            if engine.model == model and engine.tenant == tenant
        )
        by_backend: dict[str, set[int]] = {}
        for holder, location in space.locations.items():
            by_backend.setdefault(location.backend_id, set()).add(holder)
        space.pool_holders = frozenset(space.locations)
        space.candidates = tuple(
            Candidate(
                self._id(Worker(engine.instance_id, engine.dp_rank)),
                frozenset(
                    holder for backend in engine.backend_ids for holder in by_backend.get(backend, frozenset[int]())
                ),
            )
            for engine in space.engines
        )

    def drop_empty_spaces(self) -> None:
        """Forget spaces without blocks that nobody is registered in; not while a batch is half applied."""
        wanted = {
            (record.model, record.tenant) for record in (*self.registry.engines.values(), *self.registry.pools.values())
        }
        for key, space in list(self.spaces.items()):
            if key not in wanted and space.index.stats().blocks == 0:
                del self.spaces[key]
