"""One index space: holders become numbers, index events become calls in slices, candidates follow the registry (pure).

Whole holders leave by losing their number: they are invisible at once, and their blocks go in slices afterwards.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from schemas.blocks import Tier
from schemas.events import Holder, IndexCleared, IndexEvent, IndexRemoved, IndexStored, Location, Worker
from schemas.registry import EngineRecord
from services.router.index.port import CPU, DISK, NOTHING, NPU, TIERS, Buffer, Candidate, Coverage, PrefixIndex
from services.router.standing import Standings

TIER_NUMBERS = {Tier.NPU: NPU, Tier.CPU: CPU, Tier.DISK: DISK}
SLICE_BLOCKS = 1024
CLEARED_AT_ONCE = 32_768
MAX_HOLDERS = 65_536
NOBODY = 1
_HASH_BYTES = 8
_BLOCKS_PER_HOLDER = 16


class EventRefusedError(ValueError):
    """An event that cannot be applied; it has changed nothing."""


@dataclass(slots=True)
class BlockCounts:
    """What became of blocks in stores and removals (see StoreResult)."""

    attached: int = 0
    repeated: int = 0
    waiting: int = 0
    unknown: int = 0
    refused: int = 0
    removed: int = 0


class SpaceState(msgspec.Struct, frozen=True, array_like=True):
    """What a space knows beside its index: who the numbers in the index are. size: bytes of the index's own form."""

    model: str
    tenant: str
    last_sequence: tuple[int, int]
    source_epoch: int
    next_number: int
    holders: list[tuple[Holder, int]]
    domains: list[tuple[Worker | str, int]]
    leaving: list[int]
    size: int


class Space:
    """An index and the numbers of its holders. last_sequence: (source_sequence, part) of the last group applied.

    full: no new blocks are taken, because the index is over its budget and cannot forget.
    """

    def __init__(self, index: PrefixIndex, blocks: BlockCounts) -> None:
        self.index = index
        self.last_sequence = (0, 0)
        self.source_epoch = 0
        self.stale = True
        self.full = False
        self.engines: tuple[EngineRecord, ...] = ()
        self.candidates: tuple[Candidate, ...] = ()
        self.pool_holders: frozenset[int] = frozenset()
        self._dead: tuple[int, ...] = ()
        self._blocks = blocks
        self._numbers = count(NOBODY + 1)
        self._holders: dict[Holder, int] = {}
        self._domains: dict[Worker | str, int] = {}
        self._leaving: deque[int] = deque()

    def apply(self, event: IndexEvent) -> Iterator[None]:
        """Apply an event, yielding after each slice. Raises EventRefusedError."""
        if isinstance(event, IndexStored):
            return self._store(event)
        if isinstance(event, IndexRemoved):
            return self._remove(event)
        return self._clear(event)

    def state(self, model: str, tenant: str, size: int = 0) -> SpaceState:
        """A copy of everything but the index."""
        # No number above this one is in the index yet; taking it leaves a hole, which costs nothing.
        return SpaceState(
            model=model,
            tenant=tenant,
            last_sequence=self.last_sequence,
            source_epoch=self.source_epoch,
            next_number=next(self._numbers),
            holders=list(self._holders.items()),
            domains=list(self._domains.items()),
            leaving=list(self._leaving),
            size=size,
        )

    def take_over(self, state: SpaceState) -> None:
        """Become what `state` describes; the index has been restored to go with it."""
        self.last_sequence, self.source_epoch = state.last_sequence, state.source_epoch
        self._numbers = count(state.next_number)
        self._holders, self._domains = dict(state.holders), dict(state.domains)
        self._leaving = deque(state.leaving)
        self.stale = True

    def refresh(self, engines: Sequence[EngineRecord], standings: Standings) -> None:
        """Take over the engines that queries are answered for, in order. Who is hidden holds nothing for them."""
        self.stale = False
        self.engines = tuple(engines)
        hidden = {pool: standings.of_pool(pool).hidden for pool in self._pools()}
        by_backend: dict[str, set[int]] = {}
        pool_holders = set()
        for holder, number in self._holders.items():
            if isinstance(holder, Location) and not hidden[holder.pool_id]:
                by_backend.setdefault(holder.backend_id, set()).add(number)
                pool_holders.add(number)
        self.pool_holders = frozenset(pool_holders)
        known = [standings.of_engine(engine.instance_id, engine.dp_rank) for engine in engines]
        self.candidates = tuple(
            Candidate(
                NOBODY if standing.hidden else self._new_or_known(Worker(engine.instance_id, engine.dp_rank)),
                frozenset(number for backend in engine.backend_ids for number in by_backend.get(backend, ())),
            )
            for engine, standing in zip(engines, known, strict=True)
        )
        self._dead = tuple(place for place, standing in enumerate(known) if standing.dead)

    def match(self, keys: bytes) -> list[Coverage]:
        """Coverage of a query given as packed prefix keys, one entry per engine, in order; the dead have nothing."""
        return self._without_the_dead(self.index.match(keys, self.candidates, self.pool_holders))

    def match_tokens(self, tokens: Buffer, block_size: int, root: int) -> list[Coverage]:
        """The same for little-endian u32 tokens."""
        found = self.index.match_tokens(tokens, block_size, root, self.candidates, self.pool_holders)
        return self._without_the_dead(found)

    def match_contents(self, content_hashes: Buffer, root: int) -> list[Coverage]:
        """The same for packed content hashes."""
        found = self.index.match_contents(content_hashes, root, self.candidates, self.pool_holders)
        return self._without_the_dead(found)

    def _without_the_dead(self, found: list[Coverage]) -> list[Coverage]:
        for place in self._dead:
            found[place] = NOTHING
        return found

    def retire(self, holder: Holder) -> None:
        """A holder's life is over: nothing of it is seen any more, its hashes mean nothing to the next life.

        A Location with an empty backend_id stands for all of its pool.
        """
        if isinstance(holder, Location) and not holder.backend_id:
            for location in self.locations_of(holder.pool_id):
                self._leave(location)
            self._domains.pop(holder.pool_id, None)
            return
        self._leave(holder)
        if isinstance(holder, Worker):
            self._domains.pop(holder, None)

    def sweep(self, blocks: int = SLICE_BLOCKS) -> bool:
        """Drop about this many blocks of what holders without a number had; whether there is more."""
        budget = blocks
        while self._leaving and budget > 0:
            number = self._leaving[0]
            budget -= sum(self.index.holder_blocks(number)) + _BLOCKS_PER_HOLDER
            if self.index.clear_some(number, TIERS, blocks):
                return True
            self._leaving.popleft()
        return bool(self._leaving)

    def forget_idle_holders(self, registered: Iterable[Worker]) -> None:
        """Take the numbers of holders that hold nothing and are not registered."""
        kept: set[Holder] = set(registered)
        for holder in self._holders.keys() - kept:
            if not any(self.blocks_of(holder)):
                self.retire(holder)
        for name in list(self._domains):
            if isinstance(name, Worker) and name not in kept and name not in self._holders:
                del self._domains[name]

    def locations_of(self, pool_id: str) -> list[Location]:
        """The locations of a pool that have a number here."""
        return [holder for holder in self._holders if isinstance(holder, Location) and holder.pool_id == pool_id]

    def _pools(self) -> set[str]:
        return {holder.pool_id for holder in self._holders if isinstance(holder, Location)}

    def blocks_of(self, holder: Holder) -> tuple[int, int, int, int]:
        """Blocks a holder has in npu, cpu and disk, and blocks of it that wait for a parent."""
        number = self._holders.get(holder)
        if number is None:
            return 0, 0, 0, 0
        return *self.index.holder_blocks(number), self.index.waiting_blocks(number)

    def _store(self, event: IndexStored) -> Iterator[None]:
        names, contents = event.engine_hashes, event.content_hashes
        if self.full:
            raise EventRefusedError("the index is over its memory budget (router.max_bytes, router.max_space_bytes)")
        if len(names) % _HASH_BYTES or (contents and len(contents) != len(names)):
            raise EventRefusedError(f"{len(names)} bytes of engine hashes and {len(contents)} of content hashes")
        number, domain = self._number(event.holder), self._domain(event.holder)
        parent_domain = domain if event.teacher is None else self._domain(event.teacher)
        parent = event.parent
        for start in range(0, len(names), SLICE_BLOCKS * _HASH_BYTES):
            stop = start + SLICE_BLOCKS * _HASH_BYTES
            part = names[start:stop]
            result = self.index.stored(
                number,
                TIER_NUMBERS[event.tier],
                domain,
                part,
                parent,
                contents[start:stop],
                event.root,
                parent_domain,
                event.counted,
            )
            counts = self._blocks
            counts.attached += result.attached
            counts.repeated += result.repeated
            counts.waiting += result.waiting
            counts.unknown += result.unknown
            counts.refused += result.refused
            if result.refused and not result.waiting:
                # What follows would only wait for a parent that was refused.
                counts.refused += max(0, len(names) - stop) // _HASH_BYTES
                return
            parent = int.from_bytes(part[-_HASH_BYTES:], "little")
            yield
            if self._holders.get(event.holder) != number:
                return  # retired meanwhile

    def _remove(self, event: IndexRemoved) -> Iterator[None]:
        names = event.engine_hashes
        if len(names) % _HASH_BYTES:
            raise EventRefusedError(f"{len(names)} bytes of engine hashes")
        number, domain = self._number(event.holder), self._domain(event.holder)
        for start in range(0, len(names), SLICE_BLOCKS * _HASH_BYTES):
            part = names[start : start + SLICE_BLOCKS * _HASH_BYTES]
            self._blocks.removed += self.index.removed(number, TIER_NUMBERS[event.tier], domain, part)
            yield

    def _clear(self, event: IndexCleared) -> Iterator[None]:
        tiers = [TIER_NUMBERS[tier] for tier in event.tiers]
        holders: list[Holder] = [event.holder]
        if isinstance(event.holder, Location) and not event.holder.backend_id:
            holders = list(self.locations_of(event.holder.pool_id))
        for holder in holders:
            number = self._holders.get(holder)
            if number is None:
                continue
            blocks, waiting = self.index.holder_blocks(number), self.index.waiting_blocks(number)
            if self.index.stats().names <= CLEARED_AT_ONCE:
                # What a holder has may stand anywhere among the names, so all of them are gone through.
                self.index.cleared(number, tiers)
            elif not waiting and not any(blocks[tier] for tier in TIERS if tier not in tiers):
                # Nothing of it remains, so it can go on under a new number; the clear is seen as a whole.
                self._leave(holder)
            else:
                while self.index.clear_some(number, tiers, SLICE_BLOCKS):
                    yield
            yield

    def _leave(self, holder: Holder) -> None:
        number = self._holders.pop(holder, None)
        if number is not None:
            self._leaving.append(number)
            self.stale = True

    def _number(self, holder: Holder) -> int:
        if holder not in self._holders and len(self._holders) >= MAX_HOLDERS:
            raise EventRefusedError(f"{MAX_HOLDERS} holders are the most that one space takes")
        return self._new_or_known(holder)

    def _new_or_known(self, holder: Holder) -> int:
        number = self._holders.get(holder)
        if number is None:
            number = self._holders[holder] = next(self._numbers)
            self.stale = self.stale or isinstance(holder, Location)
        return number

    def _domain(self, holder: Holder) -> int:
        name = holder.pool_id if isinstance(holder, Location) else holder
        domain = self._domains.get(name)
        if domain is None:
            if len(self._domains) >= 2 * MAX_HOLDERS:
                raise EventRefusedError(f"{2 * MAX_HOLDERS} name spaces are the most that one space takes")
            domain = self._domains[name] = next(self._numbers)
        return domain
