"""The prefix index in plain dictionaries: the reference for the compiled core, and the fallback where there is none.

Costs about 400 bytes a block. See services.router.index.port for the semantics.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from schemas.blocks import chain, first_key, unpack_hashes
from services.router.index.port import CPU, DISK, NPU, TIERS, Candidate, Coverage, IndexStats, StoreResult
from services.router.index.waiting_room import WaitingChain, WaitingRoom

DEFAULT_MAX_WAITING_BLOCKS = 262_144
DEFAULT_MAX_BLOCKS = 20_000_000
_NOBODY: frozenset[int] = frozenset()
_BYTES_PER_BLOCK = 240
_BYTES_PER_CLAIM = 170


class PlainIndex:
    """One space's index; implements PrefixIndex."""

    implementation = "plain"

    def __init__(
        self, max_blocks: int = DEFAULT_MAX_BLOCKS, max_waiting_blocks: int = DEFAULT_MAX_WAITING_BLOCKS
    ) -> None:
        self._max_blocks = max_blocks
        self._holders: tuple[dict[int, set[int]], ...] = ({}, {}, {})
        # (holder, tier) -> engine_hash -> (prefix_key, stores that each need a removal)
        self._claims: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        # (holder, tier) -> prefix_key -> number of engine hashes that claim it
        self._copies: dict[tuple[int, int], dict[int, int]] = {}
        # (domain, engine_hash) -> (prefix_key, claims under this name)
        self._names: dict[tuple[int, int], tuple[int, int]] = {}
        self._domains: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._room = WaitingRoom(max_waiting_blocks)
        self.unknown_removals = 0

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
        names = unpack_hashes(engine_hashes)
        contents = unpack_hashes(content_hashes)
        self._domains.setdefault(holder, domain)
        if not contents:
            return self._stored_by_name(holder, tier, domain, names, parent_domain, counted)
        if len(names) != len(contents):
            raise ValueError(f"{len(names)} engine hashes but {len(contents)} content hashes")
        previous: int | None = None
        if parent is not None:
            previous = self._resolve(domain, parent_domain, parent)
            if previous is None:
                waiting = WaitingChain(holder, tier, domain, parent_domain, parent, names, contents, counted)
                dropped = self._room.add(waiting)
                return StoreResult(waiting=len(names), refused=dropped)
        return self._attach(holder, tier, domain, names, contents, previous, root, counted)

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> int:
        """Take blocks from one tier of a holder; the number of blocks that really left."""
        left = 0
        claims = self._claims.get((holder, tier), {})
        for name in unpack_hashes(engine_hashes):
            claim = claims.get(name)
            if claim is None:
                if not self._room.remove(holder, tier, name):
                    self.unknown_removals += 1
                continue
            key, stores = claim
            if stores > 1:
                claims[name] = (key, stores - 1)
                continue
            left += self._release(holder, tier, name)
        return left

    def cleared(self, holder: int, tiers: Sequence[int]) -> int:
        """Take everything from these tiers of a holder; blocks that left."""
        self._room.clear(holder, frozenset(tiers))
        left = 0
        for tier in tiers:
            for name in list(self._claims.get((holder, tier), ())):
                left += self._release(holder, tier, name)
        return left

    def match(self, keys: bytes, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        """Coverage of a query, one entry per candidate, in order."""
        query = unpack_hashes(keys)
        depths = self._npu_depths(query, {candidate.holder for candidate in candidates})
        return [self._coverage(query, depths[candidate.holder], candidate, pool_holders) for candidate in candidates]

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        """Blocks a holder has per tier (npu, cpu, disk)."""
        npu, cpu, disk = (len(self._copies.get((holder, tier), ())) for tier in TIERS)
        return npu, cpu, disk

    def stats(self) -> IndexStats:
        """Sizes for /workers and metrics."""
        claims = sum(len(claims) for claims in self._claims.values())
        return IndexStats(
            blocks=len(self._keys),
            memberships=sum(len(copies) for copies in self._copies.values()),
            names=len(self._names),
            waiting=self._room.blocks,
            bytes=len(self._keys) * _BYTES_PER_BLOCK + claims * _BYTES_PER_CLAIM,
            evicted=self._room.dropped_blocks,
        )

    def audit(self) -> list[str]:
        """Recompute every invariant; a sentence per violation, empty when sound."""
        wrong = []
        names: dict[tuple[int, int], int] = {}
        members: dict[tuple[int, int], set[int]] = {}
        keys: dict[int, int] = {}
        for (holder, tier), claims in self._claims.items():
            copies: dict[int, int] = {}
            for name, (key, stores) in claims.items():
                copies[key] = copies.get(key, 0) + 1
                named = (self._domains[holder], name)
                names[named] = names.get(named, 0) + 1
                if stores < 1:
                    wrong.append(f"holder {holder} tier {tier} hash {name} is claimed {stores} times")
            if copies != self._copies.get((holder, tier), {}):
                wrong.append(f"holder {holder} tier {tier}: copies differ from claims")
            for key in copies:
                members.setdefault((tier, key), set()).add(holder)
                keys[key] = keys.get(key, 0) + 1
        if {named: claims for named, (_, claims) in self._names.items()} != names:
            wrong.append("names differ from claims")
        actual = {(tier, key): holders for tier in TIERS for key, holders in self._holders[tier].items()}
        if actual != members:
            wrong.append("holders of blocks differ from claims")
        if keys != self._keys:
            wrong.append("known blocks differ from claims")
        return wrong

    def _resolve(self, domain: int, parent_domain: int, name: int) -> int | None:
        known = self._names.get((domain, name)) or self._names.get((parent_domain, name))
        return known[0] if known is not None else None

    def _stored_by_name(
        self, holder: int, tier: int, domain: int, names: array[int], parent_domain: int, counted: bool
    ) -> StoreResult:
        attached = repeated = unknown = 0
        for name in names:
            key = self._resolve(domain, parent_domain, name)
            if key is None:
                unknown += 1
            elif self._claim(holder, tier, domain, name, key, counted):
                attached += 1
            else:
                repeated += 1
        return StoreResult(attached=attached, repeated=repeated, unknown=unknown)

    def _attach(
        self,
        holder: int,
        tier: int,
        domain: int,
        names: Sequence[int],
        contents: Sequence[int],
        previous: int | None,
        root: int,
        counted: bool,
    ) -> StoreResult:
        attached = repeated = refused = 0
        first = WaitingChain(holder, tier, domain, domain, 0, array("Q", names), array("Q", contents), counted)
        work = [(first, previous)]
        while work:
            blocks, previous = work.pop()
            left = Counter(blocks.left)
            for name, content in zip(blocks.engine_hashes, blocks.content_hashes, strict=True):
                previous = first_key(root, content) if previous is None else chain(previous, content)
                if left[name] > 0:
                    left[name] -= 1
                    continue
                if len(self._keys) >= self._max_blocks and previous not in self._keys:
                    refused += 1
                    continue
                if self._claim(blocks.holder, blocks.tier, blocks.domain, name, previous, blocks.counted):
                    attached += 1
                else:
                    repeated += 1
                if self._room.waits_for(blocks.domain, name):
                    work.extend((waiting, previous) for waiting in self._room.take(blocks.domain, name))
        return StoreResult(attached=attached, repeated=repeated, refused=refused)

    def _claim(self, holder: int, tier: int, domain: int, name: int, key: int, counted: bool) -> bool:
        claims = self._claims.setdefault((holder, tier), {})
        claim = claims.get(name)
        if claim is not None:
            if claim[0] == key:
                if counted:
                    claims[name] = (key, claim[1] + 1)
                return False
            self._release(holder, tier, name)
            claims = self._claims.setdefault((holder, tier), {})
        claims[name] = (key, 1)
        _, named = self._names.get((domain, name), (key, 0))
        self._names[domain, name] = (key, named + 1)
        copies = self._copies.setdefault((holder, tier), {})
        copies[key] = copies.get(key, 0) + 1
        if copies[key] > 1:
            return False
        self._holders[tier].setdefault(key, set()).add(holder)
        self._keys[key] = self._keys.get(key, 0) + 1
        return True

    def _release(self, holder: int, tier: int, name: int) -> int:
        claims = self._claims[holder, tier]
        key, _ = claims.pop(name)
        domain = self._domains[holder]
        named_key, named = self._names[domain, name]
        if named > 1:
            self._names[domain, name] = (named_key, named - 1)
        else:
            del self._names[domain, name]
        copies = self._copies[holder, tier]
        if copies[key] > 1:
            copies[key] -= 1
            return 0
        del copies[key]
        holders = self._holders[tier][key]
        holders.discard(holder)
        if not holders:
            del self._holders[tier][key]
        if self._keys[key] > 1:
            self._keys[key] -= 1
        else:
            del self._keys[key]
        return 1

    def _npu_depths(self, query: Sequence[int], candidates: set[int]) -> dict[int, int]:
        depths = dict.fromkeys(candidates, len(query))
        alive = set(candidates)
        npu = self._holders[NPU]
        for depth, key in enumerate(query):
            holders = npu.get(key, _NOBODY)
            for holder in alive - holders:
                depths[holder] = depth
            alive &= holders
            if not alive:
                break
        return depths

    def _coverage(
        self, query: Sequence[int], start: int, candidate: Candidate, pool_holders: frozenset[int]
    ) -> Coverage:
        counts = [0, 0, 0, 0]
        for position in range(start, len(query)):
            where = self._place(query[position], candidate, pool_holders)
            if where < 0:
                break
            counts[where] += 1
        return Coverage(start, *counts)

    def _place(self, key: int, candidate: Candidate, pool_holders: frozenset[int]) -> int:
        """0..3 for CPU local, CPU remote, disk local, disk remote; -1 where nobody has the block."""
        for offset, tier in ((0, CPU), (2, DISK)):
            holders = self._holders[tier].get(key)
            if holders is None:
                continue
            if candidate.holder in holders or not holders.isdisjoint(candidate.local_holders):
                return offset
            if not holders.isdisjoint(pool_holders):
                return offset + 1
        return -1
