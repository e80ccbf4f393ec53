"""The prefix index in plain dictionaries: the reference for the compiled core, and the fallback where there is none.

See services.router.index.port for the semantics.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from schemas.blocks import PLAIN_ROOT, chain, content_hashes, first_key, prefix_keys, unpack_hashes
from services.router.index.coverage import coverages
from services.router.index.holder_sets import HolderSets
from services.router.index.plain_audit import violations
from services.router.index.plain_snapshot import read_snapshot, write_snapshot
from services.router.index.port import (
    DEFAULT_MAX_BLOCKS,
    DEFAULT_MAX_WAITING_BLOCKS,
    TIERS,
    Buffer,
    Candidate,
    Coverage,
    IndexStats,
    StoreResult,
)
from services.router.index.shelves import Names, Shelf
from services.router.index.waiting_room import Undone, WaitingChain, WaitingRoom

BYTES_PER_BLOCK = 60
BYTES_PER_CLAIM = 170
MAX_NUMBER = 1 << 31


class PlainIndex:
    """One space's index; implements PrefixIndex."""

    implementation = "plain"

    def __init__(
        self, max_blocks: int = DEFAULT_MAX_BLOCKS, max_waiting_blocks: int = DEFAULT_MAX_WAITING_BLOCKS
    ) -> None:
        self._max_blocks = max_blocks
        self._shelves: dict[tuple[int, int], Shelf] = {}
        self._names: dict[int, Names] = {}
        self._holders: tuple[dict[int, frozenset[int]], ...] = ({}, {}, {})
        self._sets = HolderSets()
        self._room = WaitingRoom(max_waiting_blocks)
        self._blocks = 0
        self._evicted = self._unknown_names = self._unknown_removals = self._renamed = 0

    def stored(
        self,
        holder: int,
        tier: int,
        domain: int,
        engine_hashes: bytes,
        parent: int | None,
        content_hashes: bytes,
        root: int,
        parent_domain: int,
        counted: bool,
    ) -> StoreResult:
        """Apply a chain of blocks (port semantics). Raises ValueError when the two hash lists differ in length."""
        _check((holder, domain, parent_domain), (tier,))
        names = unpack_hashes(engine_hashes)
        contents = unpack_hashes(content_hashes)
        if not contents:
            return self._stored_by_name(holder, tier, domain, names, parent_domain, counted)
        if len(names) != len(contents):
            raise ValueError(f"{len(names)} engine hashes but {len(contents)} content hashes")
        blocks = WaitingChain(holder, tier, domain, parent_domain, parent or 0, names, contents, counted)
        if parent is None:
            return self._attach(blocks, None, root)
        previous = self._resolve(domain, parent_domain, parent)
        if previous is not None:
            return self._attach(blocks, previous)
        fits, left = self._room.add(blocks)
        self._evicted += left
        return StoreResult(waiting=len(names) if fits else 0, refused=left)

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> int:
        """Take blocks from one tier of a holder; the number of blocks that it no longer has there."""
        _check((holder, domain), (tier,))
        left = 0
        shelf = self._shelf(holder, tier, domain)
        for name in unpack_hashes(engine_hashes):
            undone = self._room.remove(holder, tier, name)
            if undone is Undone.ONE_COUNTED:
                continue
            if name not in shelf.claims:
                self._unknown_removals += undone is Undone.NOTHING
            elif not shelf.undo_repeat(name):
                left += self._release(shelf, name)
        self._discard_if_empty(shelf)
        return left

    def cleared(self, holder: int, tiers: Sequence[int]) -> int:
        """Take everything from these tiers of a holder; blocks that left."""
        _check((holder,), tiers)
        self._room.clear(holder, tiers)
        left = 0
        for tier in tiers:
            shelf = self._shelves.pop((holder, tier), None)
            if shelf is not None:
                left += sum(self._release(shelf, name) for name in list(shelf.claims))
        return left

    def clear_some(self, holder: int, tiers: Sequence[int], limit: int) -> bool:
        """The same in slices of at most `limit` claims; whether there is more to do."""
        _check((holder,), tiers)
        self._room.clear(holder, tiers)
        for tier in tiers:
            shelf = self._shelves.get((holder, tier))
            if shelf is not None:
                names = list(islice(shelf.claims, limit))
                for name in names:
                    self._release(shelf, name)
                limit -= len(names)
                self._discard_if_empty(shelf)
        return any((holder, tier) in self._shelves for tier in tiers)

    def match(self, keys: Buffer, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        """Coverage of a query, one entry per candidate, in order."""
        return coverages(unpack_hashes(keys), self._holders, candidates, pool_holders)

    def match_tokens(
        self,
        tokens: Buffer,
        block_size: int,
        root: int,
        candidates: Sequence[Candidate],
        pool_holders: frozenset[int],
    ) -> list[Coverage]:
        """The same for little-endian u32 tokens."""
        view = memoryview(tokens).cast("B")
        if len(view) % 4:
            raise ValueError(f"tokens must be a multiple of 4 bytes long, got {len(view)}")
        keys = prefix_keys(content_hashes(view, block_size), root)
        return coverages(keys, self._holders, candidates, pool_holders)

    def match_contents(
        self, content_hashes: Buffer, root: int, candidates: Sequence[Candidate], pool_holders: frozenset[int]
    ) -> list[Coverage]:
        """The same for packed content hashes."""
        keys = prefix_keys(unpack_hashes(content_hashes), root)
        return coverages(keys, self._holders, candidates, pool_holders)

    def shrink(self, size: int, limit: int) -> bool:
        """Cannot: the plain index does not know what follows a block."""
        return False

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        """Blocks a holder has per tier (npu, cpu, disk)."""
        shelves = [self._shelves.get((holder, tier)) for tier in TIERS]
        npu, cpu, disk = (shelf.blocks() if shelf is not None else 0 for shelf in shelves)
        return npu, cpu, disk

    def waiting_blocks(self, holder: int) -> int:
        """Blocks of a holder that wait for a parent."""
        return self._room.blocks_of(holder)

    def stats(self) -> IndexStats:
        """Sizes for /workers and metrics."""
        claims = sum(len(shelf.claims) for shelf in self._shelves.values())
        return IndexStats(
            blocks=self._blocks,
            memberships=sum(shelf.blocks() for shelf in self._shelves.values()),
            names=sum(len(names.keys) for names in self._names.values()),
            waiting=self._room.blocks,
            bytes=self._blocks * BYTES_PER_BLOCK + (claims + self._room.blocks) * BYTES_PER_CLAIM,
            evicted=self._evicted,
            unknown_names=self._unknown_names,
            unknown_removals=self._unknown_removals,
            renamed=self._renamed,
        )

    def audit(self) -> list[str]:
        """Recompute every invariant; a sentence per violation, empty when sound."""
        return violations(self._shelves, self._names, self._holders, self._sets, self._blocks) + self._room.audit()

    def snapshot(self) -> bytes:
        """Everything the index holds (see services.router.index.snapshots)."""
        return write_snapshot(self._shelves, self._names, self._room, self._counters())

    def restore(self, snapshot: bytes) -> None:
        """Fill an empty index. Raises ValueError, and stays empty, for a foreign, newer or damaged snapshot."""
        if self._shelves or self._room.blocks:
            raise ValueError("the index is not empty")
        content = read_snapshot(snapshot)
        for claim in content.claims:
            shelf = self._shelf(claim.holder, claim.tier, claim.domain)
            self._claim(shelf, claim.name, claim.key, False, _Tally())
            if claim.stores > 1 and claim.name in shelf.claims:
                shelf.repeats[claim.name] = claim.stores - 1
        for domain, name, key in content.meanings:
            names = self._names.get(domain)
            if names is not None and name in names.keys:
                names.keys[name] = key
        for blocks, gone in content.chains:
            self._room.add(blocks)
            for name in gone:
                self._room.remove_from_last(name)
        self._evicted, self._unknown_names, self._unknown_removals, self._renamed = content.counters

    def _counters(self) -> tuple[int, int, int, int]:
        return self._evicted, self._unknown_names, self._unknown_removals, self._renamed

    def _resolve(self, domain: int, parent_domain: int, name: int) -> int | None:
        names = self._names.get(domain)
        key = names.keys.get(name) if names is not None else None
        if key is None and parent_domain != domain:
            names = self._names.get(parent_domain)
            key = names.keys.get(name) if names is not None else None
        return key

    def _stored_by_name(
        self, holder: int, tier: int, domain: int, names: array[int], parent_domain: int, counted: bool
    ) -> StoreResult:
        tally = _Tally()
        unknown = 0
        shelf = self._shelf(holder, tier, domain)
        for name in names:
            key = self._resolve(domain, parent_domain, name)
            if key is None:
                unknown += 1
            else:
                self._claim(shelf, name, key, counted, tally)
        self._attach_waiting(tally)
        self._discard_if_empty(shelf)
        self._unknown_names += unknown
        return StoreResult(tally.attached, tally.repeated, unknown=unknown, refused=tally.refused)

    def _attach(self, blocks: WaitingChain, previous: int | None, root: int = PLAIN_ROOT) -> StoreResult:
        tally = _Tally()
        self._walk(blocks, previous, root, tally)
        self._attach_waiting(tally)
        return StoreResult(tally.attached, tally.repeated, refused=tally.refused)

    def _attach_waiting(self, tally: _Tally) -> None:
        while tally.ready:
            blocks, previous = tally.ready.popleft()
            self._walk(blocks, previous, PLAIN_ROOT, tally)

    def _walk(self, blocks: WaitingChain, previous: int | None, root: int, tally: _Tally) -> None:
        """Claim a chain's blocks behind the key `previous`, or from `root`."""
        shelf = self._shelf(blocks.holder, blocks.tier, blocks.domain)
        for name, content in zip(blocks.engine_hashes, blocks.content_hashes, strict=True):
            previous = first_key(root, content) if previous is None else chain(previous, content)
            if name not in blocks.gone:
                self._claim(shelf, name, previous, blocks.counted, tally)
        self._discard_if_empty(shelf)

    def _claim(self, shelf: Shelf, name: int, key: int, counted: bool, tally: _Tally) -> None:
        known = shelf.claims.get(name)
        names = self._names.setdefault(shelf.domain, Names())
        if known == key:
            if counted:
                shelf.repeat(name)
            names.keys[name] = key
            tally.repeated += 1
            return
        if self._blocks >= self._max_blocks and not self._is_held(key):
            tally.refused += 1
            self._evicted += 1
            return
        if known is not None:
            self._renamed += 1
            self._release(shelf, name)
            names = self._names.setdefault(shelf.domain, Names())
        appeared = names.add(name, key)
        holders = self._holders[shelf.tier]
        current = holders.get(key)
        held = current is not None and shelf.holder in current
        shelf.add(name, key, held)
        if held:
            tally.repeated += 1
        else:
            self._blocks += current is None and not self._is_held(key)
            holders[key] = self._sets.with_holder(current, shelf.holder)
            tally.attached += 1
        if appeared and self._room.waits_for(shelf.domain, name):
            tally.ready.extend((waiting, key) for waiting in self._room.take(shelf.domain, name))

    def _release(self, shelf: Shelf, name: int) -> bool:
        """Drop a claim; whether the holder no longer has the block."""
        key, still_held = shelf.take(name)
        names = self._names[shelf.domain]
        names.drop(name)
        if not names.keys:
            del self._names[shelf.domain]
        if not still_held:
            holders = self._holders[shelf.tier]
            left = self._sets.without_holder(holders[key], shelf.holder)
            if left is not None:
                holders[key] = left
            else:
                del holders[key]
                self._blocks -= not self._is_held(key)
        return not still_held

    def _is_held(self, key: int) -> bool:
        return any(key in holders for holders in self._holders)

    def _shelf(self, holder: int, tier: int, domain: int) -> Shelf:
        shelf = self._shelves.get((holder, tier))
        if shelf is None:
            shelf = self._shelves[holder, tier] = Shelf(holder, tier, domain)
        return shelf

    def _discard_if_empty(self, shelf: Shelf) -> None:
        if not shelf.claims:
            self._shelves.pop((shelf.holder, shelf.tier), None)


@dataclass(slots=True)
class _Tally:
    """Counts of one call. ready: chains whose parent has just appeared, with its key."""

    attached: int = 0
    repeated: int = 0
    refused: int = 0
    ready: deque[tuple[WaitingChain, int]] = field(default_factory=deque)


def _check(numbers: Sequence[int], tiers: Sequence[int]) -> None:
    if not all(0 <= number < MAX_NUMBER for number in numbers):
        raise ValueError(f"holders and domains must be from 0 to {MAX_NUMBER - 1}, got {numbers}")
    if not all(tier in TIERS for tier in tiers):
        raise ValueError(f"tiers must be from {TIERS[0]} to {TIERS[-1]}, got {tiers}")
