"""What of a query each worker can use: the NPU prefix, then block by block through the pool (port semantics)."""

from collections.abc import Sequence
from typing import NamedTuple

from services.router.index.port import CPU, DISK, NPU, Candidate, Coverage

Holders = tuple[dict[int, frozenset[int]], ...]
_NOBODY: frozenset[int] = frozenset()


class _Run(NamedTuple):
    """Consecutive blocks of a query with the same holders in CPU and disk."""

    start: int
    end: int
    cpu: frozenset[int]
    disk: frozenset[int]


def coverages(
    query: Sequence[int], holders: Holders, candidates: Sequence[Candidate], pool_holders: frozenset[int]
) -> list[Coverage]:
    """One entry per candidate. Blocks with the same holders are looked at together, so their number hardly counts."""
    depths = _npu_depths(query, holders[NPU], {candidate.holder for candidate in candidates})
    starts = set(depths.values())
    runs = _pool_runs(query, holders[CPU], holders[DISK], min(starts), max(starts)) if starts else []
    return [_coverage(depths[candidate.holder], runs, candidate, pool_holders) for candidate in candidates]


def _npu_depths(query: Sequence[int], npu: dict[int, frozenset[int]], workers: set[int]) -> dict[int, int]:
    depths = dict.fromkeys(workers, len(query))
    alive = workers
    before = None
    for depth, key in enumerate(query):
        holders = npu.get(key, _NOBODY)
        if holders is before:
            continue
        before = holders
        for worker in alive - holders:
            depths[worker] = depth
        alive = alive & holders
        if not alive:
            break
    return depths


def _pool_runs(
    query: Sequence[int], cpu: dict[int, frozenset[int]], disk: dict[int, frozenset[int]], first: int, last: int
) -> list[_Run]:
    """The runs from block `first` on, at least to block `last`, then to the first block that nobody has."""
    runs: list[_Run] = []
    start, before = first, (_NOBODY, _NOBODY)
    for position in range(first, len(query)):
        here = cpu.get(query[position], _NOBODY), disk.get(query[position], _NOBODY)
        if here[0] is not before[0] or here[1] is not before[1]:
            if position > start:
                runs.append(_Run(start, position, *before))
            start, before = position, here
        if position >= last and not here[0] and not here[1]:
            break
    else:
        if len(query) > start:
            runs.append(_Run(start, len(query), *before))
    return runs


def _coverage(depth: int, runs: Sequence[_Run], candidate: Candidate, pool_holders: frozenset[int]) -> Coverage:
    counts = [0, 0, 0, 0]
    for run in runs:
        if run.end <= depth:
            continue
        place = _place(run, candidate, pool_holders)
        if place is None:
            break
        counts[place] += run.end - max(run.start, depth)
    return Coverage(depth, *counts)


def _place(run: _Run, candidate: Candidate, pool_holders: frozenset[int]) -> int | None:
    """0..3 for CPU local, CPU remote, disk local, disk remote; None where nobody reachable has the blocks."""
    for offset, holders in ((0, run.cpu), (2, run.disk)):
        if candidate.holder in holders or not holders.isdisjoint(candidate.local_holders):
            return offset
        if not holders.isdisjoint(pool_holders):
            return offset + 1
    return None
