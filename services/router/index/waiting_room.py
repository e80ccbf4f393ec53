"""The room for chains whose parent is not known yet: bounded, attached when the name appears, never taken as roots."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key")


@dataclass(slots=True, eq=False)
class WaitingChain:
    """A stored chain that waits for `parent` in `domain` or `parent_domain`. left: hashes removed while waiting."""

    holder: int
    tier: int
    domain: int
    parent_domain: int
    parent: int
    engine_hashes: array[int]
    content_hashes: array[int]
    counted: bool
    left: Counter[int] = field(default_factory=Counter)

    def blocks(self) -> int:
        """Blocks that would be held once the parent is known."""
        return len(self.engine_hashes) - self.left.total()


class WaitingRoom:
    """Waiting chains by the name they wait for, oldest first; at most max_blocks blocks wait, the oldest go first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._chains: OrderedDict[int, WaitingChain] = OrderedDict()
        self._by_name: dict[tuple[int, int], dict[int, WaitingChain]] = {}
        self._by_block: dict[tuple[int, int, int], dict[int, WaitingChain]] = {}
        self._next = 0
        self.blocks = 0
        self.dropped_blocks = 0

    def add(self, chain: WaitingChain) -> int:
        """Let a chain wait; the number of blocks that had to leave (its own when it is larger than the room)."""
        size = len(chain.engine_hashes)
        if size > self._max_blocks:
            self.dropped_blocks += size
            return size
        left = 0
        while self._chains and self.blocks + size > self._max_blocks:
            left += self._forget(next(iter(self._chains)))
        self.dropped_blocks += left
        number = self._next
        self._next += 1
        self._chains[number] = chain
        for domain in {chain.domain, chain.parent_domain}:
            self._by_name.setdefault((domain, chain.parent), {})[number] = chain
        for engine_hash in chain.engine_hashes:
            self._by_block.setdefault((chain.holder, chain.tier, engine_hash), {})[number] = chain
        self.blocks += size
        return left

    def waits_for(self, domain: int, engine_hash: int) -> bool:
        """Whether any chain waits for this name."""
        return (domain, engine_hash) in self._by_name

    def take(self, domain: int, engine_hash: int) -> list[WaitingChain]:
        """The chains that waited for this name, in order of arrival; they wait no longer."""
        waiting = self._by_name.get((domain, engine_hash))
        if not waiting:
            return []
        numbers = sorted(waiting)
        chains = [waiting[number] for number in numbers]
        for number in numbers:
            self._forget(number)
        return chains

    def remove(self, holder: int, tier: int, engine_hash: int) -> bool:
        """Undo one waiting store of a block; whether there was one."""
        for number, chain in self._by_block.get((holder, tier, engine_hash), {}).items():
            if chain.left[engine_hash] < chain.engine_hashes.count(engine_hash):
                chain.left[engine_hash] += 1
                self.blocks -= 1
                if chain.blocks() == 0:
                    self._forget(number)
                return True
        return False

    def clear(self, holder: int, tiers: frozenset[int]) -> int:
        """Forget every waiting chain of a holder in these tiers; the number of blocks."""
        numbers = [n for n, chain in self._chains.items() if chain.holder == holder and chain.tier in tiers]
        return sum(self._forget(number) for number in numbers)

    def _forget(self, number: int) -> int:
        chain = self._chains.pop(number)
        for domain in {chain.domain, chain.parent_domain}:
            _discard(self._by_name, (domain, chain.parent), number)
        for engine_hash in set(chain.engine_hashes):
            _discard(self._by_block, (chain.holder, chain.tier, engine_hash), number)
        size = chain.blocks()
        self.blocks -= size
        return size


def _discard(groups: dict[_Key, dict[int, WaitingChain]], key: _Key, number: int) -> None:
    group = groups.get(key)
    if group is not None:
        group.pop(number, None)
        if not group:
            del groups[key]
