"""The reference model of the prefix index: a list of claims, everything else recomputed from it at every question."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.blocks import PLAIN_ROOT, chain, first_key, unpack_hashes
from services.router.index.port import CPU, DISK, NPU, Candidate, Coverage, StoreResult


@dataclass
class Claim:
    """One (holder, tier, engine hash) under which a block is held. stores: removals it needs."""

    holder: int
    tier: int
    domain: int
    name: int
    key: int
    stores: int = 1


@dataclass(eq=False)
class Chain:
    """A stored chain. gone: hashes of it that were removed while it waited."""

    holder: int
    tier: int
    domain: int
    parent_domain: int
    parent: int
    blocks: list[tuple[int, int]]
    counted: bool
    gone: set[int] = field(default_factory=set)

    def size(self) -> int:
        return sum(name not in self.gone for name, _ in self.blocks)


class ReferenceIndex:
    """Same calls as PrefixIndex, no data structure worth the name."""

    def __init__(self, max_blocks: int = 10**9, max_waiting_blocks: int = 10**9) -> None:
        self.max_blocks = max_blocks
        self.max_waiting_blocks = max_waiting_blocks
        self.claims: list[Claim] = []
        self.waiting: list[Chain] = []
        self.said_last: dict[tuple[int, int], int] = {}
        self.evicted = self.unknown_names = self.unknown_removals = self.renamed = 0

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
        names, contents = unpack_hashes(engine_hashes), unpack_hashes(content_hashes)
        outcomes: list[str] = []
        ready: list[tuple[Chain, int]] = []
        if contents:
            blocks = list(zip(names, contents, strict=True))
            stored = Chain(holder, tier, domain, parent_domain, parent or 0, blocks, counted)
            key = None if parent is None else self._resolve(domain, parent_domain, parent)
            if parent is not None and key is None:
                return self._let_wait(stored)
            outcomes += self._walk(stored, key, root, ready)
        for name in names if not contents else []:
            key = self._resolve(domain, parent_domain, name)
            outcomes.append("unknown" if key is None else self._claim(holder, tier, domain, name, key, counted, ready))
        while ready:
            outcomes += self._walk(*ready.pop(0), PLAIN_ROOT, ready)
        self.evicted += outcomes.count("refused")
        self.unknown_names += outcomes.count("unknown")
        attached, repeated, unknown, refused = map(outcomes.count, ("attached", "repeated", "unknown", "refused"))
        return StoreResult(attached, repeated, unknown=unknown, refused=refused)

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> int:
        return sum(self._remove(holder, tier, name) for name in unpack_hashes(engine_hashes))

    def cleared(self, holder: int, tiers: Sequence[int]) -> int:
        left = sum(self.holder_blocks(holder)[tier] for tier in tiers)
        self.claims = [claim for claim in self.claims if claim.holder != holder or claim.tier not in tiers]
        self.waiting = [chain for chain in self.waiting if chain.holder != holder or chain.tier not in tiers]
        return left

    def match(self, keys: bytes, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        return [self._coverage(list(unpack_hashes(keys)), candidate, pool_holders) for candidate in candidates]

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        npu, cpu, disk = (
            len({claim.key for claim in self.claims if (claim.holder, claim.tier) == (holder, tier)})
            for tier in (NPU, CPU, DISK)
        )
        return npu, cpu, disk

    def waiting_blocks(self, holder: int | None = None) -> int:
        return sum(waiting.size() for waiting in self.waiting if holder in (None, waiting.holder))

    def sizes(self) -> dict[str, int]:
        """What IndexStats says, but for the memory estimate."""
        return {
            "blocks": len({claim.key for claim in self.claims}),
            "memberships": len({(claim.holder, claim.tier, claim.key) for claim in self.claims}),
            "names": len({(claim.domain, claim.name) for claim in self.claims}),
            "waiting": self.waiting_blocks(),
            "evicted": self.evicted,
            "unknown_names": self.unknown_names,
            "unknown_removals": self.unknown_removals,
            "renamed": self.renamed,
        }

    def _resolve(self, domain: int, parent_domain: int, name: int) -> int | None:
        """A name means what was said of it last, as long as anybody claims it."""
        for place in (domain, parent_domain):
            if any((claim.domain, claim.name) == (place, name) for claim in self.claims):
                return self.said_last[place, name]
        return None

    def _let_wait(self, stored: Chain) -> StoreResult:
        lost = 0
        if stored.size() > self.max_waiting_blocks:
            lost = stored.size()
        else:
            self.waiting.append(stored)
            while self.waiting_blocks() > self.max_waiting_blocks:
                lost += self.waiting.pop(0).size()
        self.evicted += lost
        return StoreResult(waiting=stored.size() if stored in self.waiting else 0, refused=lost)

    def _walk(self, stored: Chain, key: int | None, root: int, ready: list[tuple[Chain, int]]) -> list[str]:
        outcomes = []
        for name, content in stored.blocks:
            key = first_key(root, content) if key is None else chain(key, content)
            if name not in stored.gone:
                outcomes.append(
                    self._claim(stored.holder, stored.tier, stored.domain, name, key, stored.counted, ready)
                )
        return outcomes

    def _claim(
        self, holder: int, tier: int, domain: int, name: int, key: int, counted: bool, ready: list[tuple[Chain, int]]
    ) -> str:
        own = next((c for c in self.claims if (c.holder, c.tier, c.name) == (holder, tier, name)), None)
        if own is not None and own.key == key:
            own.stores += counted
            self.said_last[domain, name] = key
            return "repeated"
        keys = {claim.key for claim in self.claims}
        if key not in keys and len(keys) >= self.max_blocks:
            return "refused"
        if own is not None:
            self.claims.remove(own)
            self.renamed += 1
        had = self.holds(holder, tier, key)
        self.claims.append(Claim(holder, tier, domain, name, key))
        self.said_last[domain, name] = key
        for waiting in list(self.waiting):
            if waiting.parent == name and domain in (waiting.domain, waiting.parent_domain):
                self.waiting.remove(waiting)
                ready.append((waiting, key))
        return "repeated" if had else "attached"

    def _remove(self, holder: int, tier: int, name: int) -> bool:
        """Whether the holder no longer has the block."""
        parked = [
            waiting
            for waiting in self.waiting
            if (waiting.holder, waiting.tier) == (holder, tier)
            and name in [own for own, _ in waiting.blocks if own not in waiting.gone]
        ]
        uncounted = [waiting for waiting in parked if not waiting.counted]
        for waiting in uncounted or parked[:1]:
            waiting.gone.add(name)
            if not waiting.size():
                self.waiting.remove(waiting)
        if parked and not uncounted:
            return False
        for claim in self.claims:
            if (claim.holder, claim.tier, claim.name) == (holder, tier, name):
                claim.stores -= 1
                if not claim.stores:
                    self.claims.remove(claim)
                return not self.holds(holder, tier, claim.key)
        self.unknown_removals += not parked
        return False

    def holds(self, holder: int, tier: int, key: int) -> bool:
        return any((claim.holder, claim.tier, claim.key) == (holder, tier, key) for claim in self.claims)

    def _coverage(self, keys: list[int], candidate: Candidate, pool_holders: frozenset[int]) -> Coverage:
        counts = [0, 0, 0, 0, 0]
        for key in keys:
            if counts[1:] == [0, 0, 0, 0] and self.holds(candidate.holder, NPU, key):
                counts[0] += 1
                continue
            local = {candidate.holder, *candidate.local_holders}
            for place, tier, holders in (
                (1, CPU, local), (2, CPU, pool_holders), (3, DISK, local), (4, DISK, pool_holders)
            ):  # fmt: skip
                if any(self.holds(holder, tier, key) for holder in holders):
                    counts[place] += 1
                    break
            else:
                break
        return Coverage(*counts)
