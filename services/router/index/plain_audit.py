"""Recomputes every invariant of the plain index from its claims."""

from collections import Counter
from collections.abc import Mapping

from services.router.index.coverage import Holders
from services.router.index.holder_sets import HolderSets
from services.router.index.port import TIERS
from services.router.index.shelves import Names, Shelf


def violations(
    shelves: Mapping[tuple[int, int], Shelf],
    names: Mapping[int, Names],
    holders: Holders,
    sets: HolderSets,
    blocks: int,
) -> list[str]:
    """A sentence per violation, empty when sound."""
    wrong = []
    claims_by_name: dict[int, Counter[int]] = {}
    members: tuple[dict[int, set[int]], ...] = ({}, {}, {})
    for (holder, tier), shelf in shelves.items():
        where = f"holder {holder} tier {tier}"
        if (holder, tier) != (shelf.holder, shelf.tier) or not shelf.claims:
            wrong.append(f"{where}: shelf is empty or misplaced")
        claimed = Counter(shelf.claims.values())
        if shelf.copies != {key: number - 1 for key, number in claimed.items() if number > 1}:
            wrong.append(f"{where}: keys under several names differ from the claims")
        if shelf.blocks() != len(claimed):
            wrong.append(f"{where}: {shelf.blocks()} blocks but {len(claimed)} keys are claimed")
        if not shelf.repeats.keys() <= shelf.claims.keys() or any(number < 1 for number in shelf.repeats.values()):
            wrong.append(f"{where}: repeated stores without a claim")
        claims_by_name.setdefault(shelf.domain, Counter()).update(shelf.claims.keys())
        for key in claimed:
            members[tier].setdefault(key, set()).add(holder)
    for domain in claims_by_name.keys() | names.keys():
        counts = claims_by_name.get(domain, Counter())
        known = names.get(domain, Names())
        if known.keys.keys() != counts.keys() or known.more != {n: c - 1 for n, c in counts.items() if c > 1}:
            wrong.append(f"domain {domain}: names differ from the claims")
    wrong.extend(
        f"tier {tier}: holders of blocks differ from the claims" for tier in TIERS if holders[tier] != members[tier]
    )
    if sets.uses() != Counter(current for tier in TIERS for current in holders[tier].values()):
        wrong.append("interned holder sets differ from their uses")
    if blocks != len(set().union(*holders)):
        wrong.append(f"{blocks} blocks are counted, {len(set().union(*holders))} are held")
    return wrong
