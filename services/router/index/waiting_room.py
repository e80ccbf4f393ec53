"""The room for chains whose parent is not known yet: bounded, attached when the name appears, never taken as roots."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

_Key = TypeVar("_Key")


class Undone(Enum):
    """What a removal found among the waiting stores of a block."""

    NOTHING = auto()
    UNCOUNTED = auto()
    ONE_COUNTED = auto()


@dataclass(slots=True, eq=False)
class WaitingChain:
    """A stored chain that waits for `parent` in `domain` or `parent_domain`. gone: hashes removed while waiting."""

    holder: int
    tier: int
    domain: int
    parent_domain: int
    parent: int
    engine_hashes: array[int]
    content_hashes: array[int]
    counted: bool
    gone: set[int] = field(default_factory=set)
    blocks: int = 0

    def __post_init__(self) -> None:
        self.blocks = len(self.engine_hashes)

    def domains(self) -> set[int]:
        """Where the parent may appear."""
        return {self.domain, self.parent_domain}

    def lose(self, engine_hash: int) -> int:
        """Mark a block as removed; how many places of the chain it had."""
        self.gone.add(engine_hash)
        places = self.engine_hashes.count(engine_hash)
        self.blocks -= places
        return places


class _Numbers(Generic[_Key]):
    """Key -> chain numbers in order of arrival; the usual single one costs no container."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int | dict[int, None]] = {}

    def __contains__(self, key: _Key) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def keys(self) -> list[_Key]:
        return list(self._numbers)

    def add(self, key: _Key, number: int) -> None:
        known = self._numbers.get(key)
        if known is None:
            self._numbers[key] = number
        elif isinstance(known, dict):
            known[number] = None
        else:
            self._numbers[key] = {known: None, number: None}

    def discard(self, key: _Key, number: int) -> None:
        known = self._numbers.get(key)
        if isinstance(known, dict):
            known.pop(number, None)
            if not known:
                del self._numbers[key]
        elif known == number:
            del self._numbers[key]

    def all(self, key: _Key) -> list[int]:
        known = self._numbers.get(key)
        if known is None:
            return []
        return list(known) if isinstance(known, dict) else [known]

    def first(self, key: _Key) -> int | None:
        known = self._numbers.get(key)
        return next(iter(known)) if isinstance(known, dict) else known


class WaitingRoom:
    """Waiting chains by the name they wait for; at most max_blocks blocks wait, the oldest chains go first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._next = 0
        self._chains: dict[int, WaitingChain] = {}
        self._by_parent: _Numbers[tuple[int, int]] = _Numbers()
        # (holder, tier, counted) -> engine hash -> chains that carry it
        self._shelves: dict[tuple[int, int, bool], _Numbers[int]] = {}
        self._by_holder: Counter[int] = Counter()
        self.blocks = 0

    def add(self, chain: WaitingChain) -> tuple[bool, int]:
        """Let a chain wait; whether it fits the room at all, and how many blocks were lost (its own if it does not)."""
        if chain.blocks > self._max_blocks:
            return False, chain.blocks
        left = 0
        while self.blocks + chain.blocks > self._max_blocks:
            left += self._forget(next(iter(self._chains)))
        number = self._next
        self._next += 1
        self._chains[number] = chain
        for domain in chain.domains():
            self._by_parent.add((domain, chain.parent), number)
        shelf = self._shelves.setdefault((chain.holder, chain.tier, chain.counted), _Numbers())
        for name in set(chain.engine_hashes):
            shelf.add(name, number)
        self._resize(chain, chain.blocks)
        return True, left

    def waits_for(self, domain: int, engine_hash: int) -> bool:
        """Whether any chain waits for this name."""
        return (domain, engine_hash) in self._by_parent

    def take(self, domain: int, engine_hash: int) -> list[WaitingChain]:
        """The chains that waited for this name, in order of arrival; they wait no longer."""
        numbers = self._by_parent.all((domain, engine_hash))
        chains = [self._chains[number] for number in numbers]
        for number in numbers:
            self._forget(number)
        return chains

    def remove(self, holder: int, tier: int, engine_hash: int) -> Undone:
        """Undo waiting stores of a block: every one that is not counted, or else the oldest counted one."""
        uncounted = self._shelves.get((holder, tier, False))
        numbers = uncounted.all(engine_hash) if uncounted is not None else []
        for number in numbers:
            self._lose(number, engine_hash)
        if numbers:
            return Undone.UNCOUNTED
        counted = self._shelves.get((holder, tier, True))
        oldest = counted.first(engine_hash) if counted is not None else None
        if oldest is None:
            return Undone.NOTHING
        self._lose(oldest, engine_hash)
        return Undone.ONE_COUNTED

    def remove_from_last(self, engine_hash: int) -> None:
        """Take a block of the youngest chain for removed, as in a snapshot."""
        number = next(reversed(self._chains), None)
        if number is not None:
            self._lose(number, engine_hash)

    def chains(self) -> list[WaitingChain]:
        """All of them in order of arrival."""
        return list(self._chains.values())

    def clear(self, holder: int, tiers: Iterable[int]) -> None:
        """Forget every waiting chain of a holder in these tiers."""
        for tier in tiers:
            for counted in (False, True):
                shelf = self._shelves.get((holder, tier, counted))
                while shelf:
                    for name in shelf.keys():  # noqa: SIM118 - the chains leave while they are visited
                        for number in shelf.all(name):
                            self._forget(number)

    def blocks_of(self, holder: int) -> int:
        """Blocks of one holder that wait."""
        return self._by_holder[holder]

    def audit(self) -> list[str]:
        """Recompute every look-up from the chains; a sentence per violation."""
        wrong = []
        parents: dict[tuple[int, int], list[int]] = {}
        carried: dict[tuple[int, int, bool, int], list[int]] = {}
        by_holder: Counter[int] = Counter()
        for number, chain in self._chains.items():
            for domain in chain.domains():
                parents.setdefault((domain, chain.parent), []).append(number)
            for name in set(chain.engine_hashes) - chain.gone:
                carried.setdefault((chain.holder, chain.tier, chain.counted, name), []).append(number)
            by_holder[chain.holder] += chain.blocks
            if chain.blocks != sum(name not in chain.gone for name in chain.engine_hashes) or not chain.blocks:
                wrong.append(f"waiting chain {number} counts {chain.blocks} blocks")
        if parents != {key: self._by_parent.all(key) for key in self._by_parent.keys()}:  # noqa: SIM118
            wrong.append("waiting chains differ from the names they wait for")
        if carried != {
            (*key, name): shelf.all(name)
            for key, shelf in self._shelves.items()
            for name in shelf.keys()  # noqa: SIM118
        }:
            wrong.append("waiting chains differ from their blocks")
        if by_holder != self._by_holder or by_holder.total() != self.blocks:
            wrong.append("the number of waiting blocks is wrong")
        if self.blocks > self._max_blocks:
            wrong.append(f"{self.blocks} blocks wait, at most {self._max_blocks} may")
        return wrong

    def _lose(self, number: int, engine_hash: int) -> None:
        chain = self._chains[number]
        self._take_off_shelf(chain, (engine_hash,), number)
        self._resize(chain, -chain.lose(engine_hash))
        if not chain.blocks:
            self._forget(number)

    def _forget(self, number: int) -> int:
        chain = self._chains.pop(number)
        for domain in chain.domains():
            self._by_parent.discard((domain, chain.parent), number)
        self._take_off_shelf(chain, set(chain.engine_hashes) - chain.gone, number)
        self._resize(chain, -chain.blocks)
        return chain.blocks

    def _take_off_shelf(self, chain: WaitingChain, names: Iterable[int], number: int) -> None:
        key = (chain.holder, chain.tier, chain.counted)
        shelf = self._shelves.get(key)
        if shelf is None:
            return
        for name in names:
            shelf.discard(name, number)
        if not shelf:
            del self._shelves[key]

    def _resize(self, chain: WaitingChain, change: int) -> None:
        self.blocks += change
        self._by_holder[chain.holder] += change
        if not self._by_holder[chain.holder]:
            del self._by_holder[chain.holder]
