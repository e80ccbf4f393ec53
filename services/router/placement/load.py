"""The load account: work is charged at decision time and taken back exactly once.

A lease remembers what it charged to whom, so whatever happens to the worker meanwhile no sum goes below zero.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.router.placement.models import WorkerKey


class Load(NamedTuple):
    """A worker's open work: prefill tokens that wait or run, blocks of requests that are not complete, requests."""

    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Lease:
    worker: WorkerKey
    prefill_tokens: int
    decode_blocks: int
    expires: float


class LoadAccount:
    """Open leases by receipt. lease_seconds: until an unfinished one is given up. Not for several threads.

    max_leases: beyond it the oldest lease is given up for a new one (counted in `expired` as well).
    """

    def __init__(self, lease_seconds: float = 600.0, max_leases: int = 100_000) -> None:
        self._lease_seconds = lease_seconds
        self._max_leases = max_leases
        self._leases: dict[str, _Lease] = {}
        self._loads: dict[WorkerKey, Load] = {}
        self.expired = 0
        self.unknown = 0

    def __len__(self) -> int:
        return len(self._leases)

    def of(self, worker: WorkerKey) -> Load:
        """What is charged to a worker."""
        return self._loads.get(worker, Load())

    def charge(self, receipt: str, worker: WorkerKey, prefill_tokens: int, decode_blocks: int, now: float) -> None:
        """Open a lease. Raises ValueError for a receipt that is open already and for negative work."""
        if receipt in self._leases:
            raise ValueError(f"receipt {receipt} is charged already")
        if prefill_tokens < 0 or decode_blocks < 0:
            raise ValueError(f"work cannot be negative: {prefill_tokens} tokens, {decode_blocks} blocks")
        self.expire(now)
        if len(self._leases) >= self._max_leases:
            self._give_up(next(iter(self._leases)))
        self._leases[receipt] = _Lease(worker, prefill_tokens, decode_blocks, now + self._lease_seconds)
        self._add(worker, prefill_tokens, decode_blocks, 1)

    def prefill_done(self, receipt: str) -> bool:
        """The first token came: the prefill is no load any more. Whether that was news."""
        lease = self._leases.get(receipt)
        if lease is None or not lease.prefill_tokens:
            return False
        self._add(lease.worker, -lease.prefill_tokens, 0, 0)
        lease.prefill_tokens = 0
        return True

    def complete(self, receipt: str) -> bool:
        """Close a lease. False, and nothing changes, for one that is unknown, completed or expired."""
        lease = self._leases.pop(receipt, None)
        if lease is None:
            self.unknown += 1
            return False
        self._add(lease.worker, -lease.prefill_tokens, -lease.decode_blocks, -1)
        return True

    def expire(self, now: float) -> int:
        """Give up leases whose time is over; how many. All last equally long, so the oldest come first."""
        count = 0
        while self._leases:
            receipt, lease = next(iter(self._leases.items()))
            if lease.expires > now:
                break
            self._give_up(receipt)
            count += 1
        return count

    def _give_up(self, receipt: str) -> None:
        lease = self._leases.pop(receipt)
        self._add(lease.worker, -lease.prefill_tokens, -lease.decode_blocks, -1)
        self.expired += 1

    def _add(self, worker: WorkerKey, prefill_tokens: int, decode_blocks: int, requests: int) -> None:
        load = self._loads.get(worker, Load())
        changed = Load(
            load.prefill_tokens + prefill_tokens, load.decode_blocks + decode_blocks, load.requests + requests
        )
        if changed.requests:
            self._loads[worker] = changed
        else:
            # Who has no open lease has no entry, so workers that are gone cost nothing.
            self._loads.pop(worker, None)
