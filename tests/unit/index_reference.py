"""The reference model of the prefix index: a list of claims, everything else recomputed from it at every question."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.blocks import chain, first_key, unpack_hashes
from services.router.index.port import CPU, DISK, NPU, Candidate, Coverage


@dataclass
class Claim:
    """One (holder, tier, engine hash) under which a block is held. stores: removals it needs."""

    holder: int
    tier: int
    domain: int
    name: int
    key: int
    stores: int = 1


@dataclass
class Chain:
    """A stored chain that waits for its parent; None: that block was removed while it waited."""

    holder: int
    tier: int
    domain: int
    parent_domain: int
    parent: int
    blocks: list[tuple[int, int, bool]]
    counted: bool


class ReferenceIndex:
    """Same calls as PrefixIndex, no data structure worth the name."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.waiting: list[Chain] = []
        self.said_last: dict[tuple[int, int], int] = {}

    def _resolve(self, domain: int, name: int) -> int | None:
        """A name means what was said of it last, as long as anybody claims it."""
        if any((claim.domain, claim.name) == (domain, name) for claim in self.claims):
            return self.said_last[domain, name]
        return None

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
    ) -> None:
        names, contents = unpack_hashes(engine_hashes), unpack_hashes(content_hashes)
        if not contents:
            for name in names:
                key = self._resolve(domain, name)
                key = self._resolve(parent_domain, name) if key is None else key
                if key is not None:
                    self._claim(holder, tier, domain, name, key, counted)
            return
        blocks = [(name, content, True) for name, content in zip(names, contents, strict=True)]
        previous: int | None = None
        if parent is not None:
            previous = self._resolve(domain, parent)
            previous = self._resolve(parent_domain, parent) if previous is None else previous
            if previous is None:
                self.waiting.append(Chain(holder, tier, domain, parent_domain, parent, blocks, counted))
                return
        self._attach(Chain(holder, tier, domain, parent_domain, 0, blocks, counted), previous, root)

    def _attach(self, first: Chain, previous: int | None, root: int) -> None:
        work = [(first, previous)]
        while work:
            blocks, key = work.pop()
            for name, content, present in blocks.blocks:
                key = first_key(root, content) if key is None else chain(key, content)
                if not present:
                    continue
                self._claim(blocks.holder, blocks.tier, blocks.domain, name, key, blocks.counted)
                ready = [w for w in self.waiting if w.parent == name and blocks.domain in (w.domain, w.parent_domain)]
                for waiting in ready:
                    self.waiting.remove(waiting)
                    work.append((waiting, key))

    def _claim(self, holder: int, tier: int, domain: int, name: int, key: int, counted: bool) -> None:
        for claim in self.claims:
            if (claim.holder, claim.tier, claim.name) == (holder, tier, name):
                if claim.key == key:
                    claim.stores += counted
                    return
                self.claims.remove(claim)
                break
        self.claims.append(Claim(holder, tier, domain, name, key))
        self.said_last[domain, name] = key

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> None:
        for name in unpack_hashes(engine_hashes):
            for claim in self.claims:
                if (claim.holder, claim.tier, claim.name) == (holder, tier, name):
                    claim.stores -= 1
                    if claim.stores == 0:
                        self.claims.remove(claim)
                    break
            else:
                self._remove_waiting(holder, tier, name)

    def _remove_waiting(self, holder: int, tier: int, name: int) -> None:
        for waiting in self.waiting:
            if (waiting.holder, waiting.tier) != (holder, tier):
                continue
            for number, (own, content, present) in enumerate(waiting.blocks):
                if own == name and present:
                    waiting.blocks[number] = (own, content, False)
                    if not any(present for _, _, present in waiting.blocks):
                        self.waiting.remove(waiting)
                    return

    def cleared(self, holder: int, tiers: Sequence[int]) -> None:
        self.claims = [claim for claim in self.claims if claim.holder != holder or claim.tier not in tiers]
        self.waiting = [chain for chain in self.waiting if chain.holder != holder or chain.tier not in tiers]

    def holds(self, holder: int, tier: int, key: int) -> bool:
        return any((claim.holder, claim.tier, claim.key) == (holder, tier, key) for claim in self.claims)

    def match(self, keys: bytes, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        return [self._coverage(list(unpack_hashes(keys)), candidate, pool_holders) for candidate in candidates]

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

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        npu, cpu, disk = (
            len({claim.key for claim in self.claims if (claim.holder, claim.tier) == (holder, tier)})
            for tier in (NPU, CPU, DISK)
        )
        return npu, cpu, disk
