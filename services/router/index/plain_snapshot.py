"""Reads and writes snapshots of the plain index (form: services.router.index.snapshots)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from services.router.index.port import TIERS
from services.router.index.shelves import Names, Shelf
from services.router.index.snapshots import CHECK_SEED, MAGIC, VERSION
from services.router.index.waiting_room import WaitingChain, WaitingRoom

Counters = tuple[int, int, int, int]
Member = tuple[int, int]

_U64 = struct.Struct("<Q")
_MEMBER = struct.Struct("<II")
_ENTRY = struct.Struct("<QQQ")
_SHELF = struct.Struct("<IIQ")
_REPEAT = struct.Struct("<IIQQ")
_CHAIN = struct.Struct("<IIIIIIQ")
_MAX_HOLDER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SavedClaim:
    """One claim with its number of stores."""

    holder: int
    tier: int
    domain: int
    name: int
    key: int
    stores: int


@dataclass(frozen=True, slots=True)
class SavedIndex:
    """What a snapshot says. meanings: (domain, name, key); chains: in order of arrival, with the names gone."""

    claims: list[SavedClaim]
    meanings: list[tuple[int, int, int]]
    chains: list[tuple[WaitingChain, set[int]]]
    counters: Counters


def write_snapshot(
    shelves: Mapping[Member, Shelf], names: Mapping[int, Names], room: WaitingRoom, counters: Counters
) -> bytes:
    """The snapshot of an index with these parts."""
    members: dict[tuple[int, int], list[Member]] = {}
    repeats = []
    meanings = []
    for (holder, tier), shelf in shelves.items():
        for name, key in shelf.claims.items():
            members.setdefault((name, key), []).append((holder, tier))
            meaning = names[shelf.domain].keys[name]
            if meaning != key:
                meanings.append((shelf.domain, name, meaning))
        repeats += [(holder, tier, name, stores) for name, stores in shelf.repeats.items()]
    numbers: dict[tuple[Member, ...], int] = {}
    entries = [
        _ENTRY.pack(name, key, numbers.setdefault(tuple(sorted(who)), len(numbers) + 1))
        for (name, key), who in members.items()
    ]
    out = [MAGIC, _U64.pack(VERSION), *(_U64.pack(count) for count in counters), _U64.pack(0)]
    out += [_U64.pack(len(shelves)), *(_SHELF.pack(*where, shelf.domain) for where, shelf in shelves.items())]
    out.append(_U64.pack(len(numbers)))
    for who_together in numbers:
        out += [_U64.pack(len(who_together)), *(_MEMBER.pack(*member) for member in who_together)]
    out += [_U64.pack(len(entries)), *entries]
    out += [_U64.pack(len(meanings)), *(_ENTRY.pack(*meaning) for meaning in meanings)]
    out += [_U64.pack(len(repeats)), *(_REPEAT.pack(*repeat) for repeat in repeats)]
    chains = room.chains()
    out += [_U64.pack(len(chains)), *(_written_chain(chain) for chain in chains)]
    body = b"".join(out)
    return body + _U64.pack(xxhash.xxh3_64_intdigest(body, CHECK_SEED))


def _written_chain(chain: WaitingChain) -> bytes:
    count = len(chain.engine_hashes)
    gone = bytes(name in chain.gone for name in chain.engine_hashes) + bytes(-count % 8)
    head = (chain.holder, chain.tier, chain.domain, chain.parent_domain, chain.counted, count, chain.parent)
    return _CHAIN.pack(*head) + chain.engine_hashes.tobytes() + chain.content_hashes.tobytes() + gone


class _Reader:
    """Reads one after the other; what is not there is damage."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise ValueError("the snapshot is damaged: its parts do not agree")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def records(self, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        return form.iter_unpack(self.take(self.number() * form.size))

    def hashes(self, count: int) -> array[int]:
        values = array("Q")
        values.frombytes(self.take(8 * count))
        return values

    def ends_here(self) -> bool:
        return self._at == len(self._data)


def read_snapshot(snapshot: bytes) -> SavedIndex:
    """What a snapshot says. Raises ValueError for a foreign, newer or damaged one."""
    if len(snapshot) < 24 or snapshot[:8] != MAGIC:
        raise ValueError("this is not an index snapshot")
    body, check = snapshot[:-8], _U64.unpack(snapshot[-8:])[0]
    reader = _Reader(body)
    reader.take(8)
    if reader.number() != VERSION:
        raise ValueError(f"the snapshot has another version than {VERSION}")
    if xxhash.xxh3_64_intdigest(body, CHECK_SEED) != check:
        raise ValueError("the snapshot is damaged: its checksum does not agree")
    counters = (reader.number(), reader.number(), reader.number(), reader.number())
    reader.take(reader.number() * _ENTRY.size)
    domains = {(holder, _tier(holder, tier)): domain for holder, tier, domain in reader.records(_SHELF)}
    sets = [[(holder, _tier(holder, tier)) for holder, tier in reader.records(_MEMBER)] for _ in range(reader.number())]
    claims: dict[tuple[int, int, int], SavedClaim] = {}
    for name, key, number in reader.records(_ENTRY):
        if not 0 < number <= len(sets) or not domains.keys() >= set(sets[number - 1]):
            raise ValueError("the snapshot is damaged: its parts do not agree")
        for holder, tier in sets[number - 1]:
            claims[holder, tier, name] = SavedClaim(holder, tier, domains[holder, tier], name, key, 1)
    meanings = [(domain, name, key) for domain, name, key in reader.records(_ENTRY)]
    for holder, tier, name, stores in reader.records(_REPEAT):
        claim = claims.get((holder, tier, name))
        if claim is not None:
            claims[holder, tier, name] = SavedClaim(holder, tier, claim.domain, name, claim.key, stores + 1)
    chains = [_read_chain(reader) for _ in range(reader.number())]
    if not reader.ends_here():
        raise ValueError("the snapshot is damaged: its parts do not agree")
    return SavedIndex(list(claims.values()), meanings, chains, counters)


def _read_chain(reader: _Reader) -> tuple[WaitingChain, set[int]]:
    holder, tier, domain, parent_domain, counted, count, parent = _CHAIN.unpack(reader.take(_CHAIN.size))
    names, contents = reader.hashes(count), reader.hashes(count)
    gone = bytes(reader.take(count + -count % 8))[:count]
    chain = WaitingChain(holder, _tier(holder, tier), domain, parent_domain, parent, names, contents, bool(counted))
    return chain, {name for name, lost in zip(names, gone, strict=True) if lost}


def _tier(holder: int, tier: int) -> int:
    if tier not in TIERS or holder > _MAX_HOLDER:
        raise ValueError("the snapshot is damaged: its parts do not agree")
    return tier
