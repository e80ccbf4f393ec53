"""What a memcache MetaService knows: which object key lies at which LocalService, in DRAM or on its disk. No socket.

One KV block has one object key per shard; a location that runs out of DRAM moves its oldest keys to its disk, and
one that runs out of disk drops them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

CPU = "cpu"
DISK = "disk"
EventType = Literal["stored", "removed", "cleared"]


@dataclass(frozen=True)
class PoolEvent:
    """One change of the pool. key: object key, None for ``cleared``; medium None: not named."""

    event_type: EventType
    medium: str | None
    backend_id: str
    event_id: int
    key: str | None = None


@dataclass(frozen=True)
class Placed:
    """Where a key lies."""

    medium: str
    backend_id: str


@dataclass
class _LocalService:
    capacity: dict[str, int]
    keys: dict[str, OrderedDict[str, None]] = field(default_factory=lambda: {CPU: OrderedDict(), DISK: OrderedDict()})

    def room(self, medium: str) -> int:
        return self.capacity[medium] - len(self.keys[medium])


def object_key(model: str, block_hash: bytes, tp_rank: int = 0) -> str:
    """The key under which an engine's shard puts a block."""
    return f"{model}@tp_rank:{tp_rank}@pcp0@dcp0@pp_rank:0@group:0@{block_hash.hex()}"


class PoolStore:
    """Keys by location, least recently used first; every change leaves an event to be fetched with ``take_events``."""

    def __init__(self) -> None:
        self._services: dict[str, _LocalService] = {}
        self._placed: dict[str, Placed] = {}
        self._events: list[PoolEvent] = []
        self._event_ids: dict[tuple[str, str | None], int] = {}
        self.evictions = 0

    @property
    def backend_ids(self) -> tuple[str, ...]:
        """Attached LocalServices."""
        return tuple(self._services)

    def keys(self, backend_id: str, medium: str) -> set[str]:
        """What a location holds."""
        return set(self._services[backend_id].keys[medium])

    def capacity(self, medium: str) -> int:
        """Keys that fit into all locations together."""
        return sum(service.capacity[medium] for service in self._services.values())

    def used(self, medium: str) -> int:
        """Keys held by all locations together."""
        return sum(len(service.keys[medium]) for service in self._services.values())

    def attach(self, backend_id: str, cpu_keys: int, disk_keys: int = 0) -> None:
        """A LocalService joins and lends room; one that was there before is taken as restarted (its keys are lost)."""
        if backend_id in self._services:
            self.detach(backend_id)
        self._services[backend_id] = _LocalService({CPU: cpu_keys, DISK: disk_keys})

    def detach(self, backend_id: str) -> None:
        """A LocalService is lost with all it held. Raises KeyError for an unknown one."""
        service = self._services.pop(backend_id)
        for keys in service.keys.values():
            for key in keys:
                del self._placed[key]
        self._emit("cleared", None, backend_id)

    def clear(self) -> None:
        """Drop every key everywhere; the LocalServices stay."""
        for backend_id, service in self._services.items():
            for keys in service.keys.values():
                for key in keys:
                    del self._placed[key]
                keys.clear()
            self._emit("cleared", None, backend_id)

    def put(self, backend_id: str, keys: Sequence[str]) -> list[bool]:
        """Store keys, by preference at this location; True for those that were not in the pool before.

        A full location sends what it cannot take to the one with the most free DRAM, and evicts when none has any.
        Raises KeyError for an unknown location.
        """
        if backend_id not in self._services:
            raise KeyError(backend_id)
        return [self._put(backend_id, key) for key in keys]

    def find(self, keys: Sequence[str]) -> list[Placed | None]:
        """Where keys lie, None for those the pool does not have; found ones count as used just now."""
        found = [self._placed.get(key) for key in keys]
        for key, place in zip(keys, found, strict=True):
            if place:
                self._services[place.backend_id].keys[place.medium].move_to_end(key)
        return found

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Drop keys; True for those that were there."""
        removed = []
        for key in keys:
            place = self._placed.pop(key, None)
            if place:
                del self._services[place.backend_id].keys[place.medium][key]
                self._emit("removed", place.medium, place.backend_id, key)
            removed.append(place is not None)
        return removed

    def take_events(self) -> list[PoolEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _put(self, backend_id: str, key: str) -> bool:
        if key in self._placed:
            self.find([key])
            return False
        if self._services[backend_id].room(CPU) < 1:
            roomiest = max(self._services, key=lambda name: self._services[name].room(CPU))
            if self._services[roomiest].room(CPU) > 0:
                backend_id = roomiest
        if self._services[backend_id].capacity[CPU] < 1:
            return False
        while self._services[backend_id].room(CPU) < 1:
            self._evict(backend_id)
        self._place(key, CPU, backend_id)
        return True

    def _evict(self, backend_id: str) -> None:
        """Move the oldest key out of DRAM: to disk when there is one, making room there first."""
        service = self._services[backend_id]
        oldest = next(iter(service.keys[CPU]))
        self.evictions += 1
        self.remove([oldest])
        if service.capacity[DISK] < 1:
            return
        if service.room(DISK) < 1:
            self.remove([next(iter(service.keys[DISK]))])
        self._place(oldest, DISK, backend_id)

    def _place(self, key: str, medium: str, backend_id: str) -> None:
        self._placed[key] = Placed(medium, backend_id)
        self._services[backend_id].keys[medium][key] = None
        self._emit("stored", medium, backend_id, key)

    def _emit(self, event_type: EventType, medium: str | None, backend_id: str, key: str | None = None) -> None:
        counter = (backend_id, medium)
        event_id = self._event_ids.get(counter, 0)
        self._event_ids[counter] = event_id + 1
        self._events.append(PoolEvent(event_type, medium, backend_id, event_id, key))
