"""Predicted blocks: what was just routed to a worker counts as present there until events say so or time is up."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from services.router.placement.models import WorkerKey


class _Routed(NamedTuple):
    expires: float
    worker: WorkerKey
    keys: array[int]


class Prediction:
    """Prefix keys by worker for `seconds` after the last request that had them; at most max_blocks, oldest go first.

    Every request marks all of its keys, so a key that is marked has everything before it marked at least as long.
    """

    def __init__(self, seconds: float = 30.0, max_blocks: int = 1_000_000) -> None:
        self._seconds = seconds
        self._max_blocks = max_blocks
        self._expiries: dict[WorkerKey, dict[int, float]] = {}
        self._routed: deque[_Routed] = deque()
        self.blocks = 0

    def routed(self, worker: WorkerKey, keys: array[int], now: float) -> None:
        """A request with these prefix keys goes to a worker."""
        self.expire(now)
        keys = keys[: self._max_blocks]
        if not keys:
            return
        while self._routed and self.blocks + len(keys) > self._max_blocks:
            self._drop_oldest()
        expires = now + self._seconds
        self._expiries.setdefault(worker, {}).update(dict.fromkeys(keys, expires))
        self._routed.append(_Routed(expires, worker, keys))
        self.blocks += len(keys)

    def leading_blocks(self, worker: WorkerKey, keys: array[int], now: float) -> int:
        """Leading blocks of a request predicted on a worker."""
        known = self._expiries.get(worker)
        if not known or not keys or known.get(keys[0], now) <= now:
            return 0
        # A marked key implies marked keys before it, so the end is found by halving.
        low, high = 1, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if known.get(keys[middle - 1], now) > now:
                low = middle
            else:
                high = middle - 1
        return low

    def forget(self, worker: WorkerKey) -> None:
        """A worker lost its cache (restart, clear) or is gone."""
        self._expiries.pop(worker, None)

    def expire(self, now: float) -> None:
        """Drop what is over."""
        while self._routed and self._routed[0].expires <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._routed.popleft()
        self.blocks -= len(oldest.keys)
        known = self._expiries.get(oldest.worker)
        if known is None:
            return
        for key in oldest.keys:
            if known.get(key) == oldest.expires:
                del known[key]
        if not known:
            del self._expiries[oldest.worker]
