"""Whose messages a socket carries: one data-parallel rank's, or those of several that count for themselves (pure).

The rank of a publisher is the registered one, whatever its batches say (engines are known to write 0 for every rank).
But when batches of different ranks come through one socket, each rank has numbers of its own: only one of them is this
publisher's, and a number of another rank means nothing for it.
"""

from collections import Counter
from enum import Enum, auto

MAX_RANKS_SHOWN = 64


class Owner(Enum):
    """OWN: this publisher's. OTHER: of another rank on the same socket. FOUND: this publisher's, and what was taken
    before was another rank's."""

    OWN = auto()
    OTHER = auto()
    FOUND = auto()


class RankGate:
    """Tells the messages of one registered rank from the others'.

    shared: several ranks are registered with this socket. conflicts: batches that name another rank than the registered
    one and count as its own. others: messages of other ranks, by rank.
    """

    def __init__(self, registered: int, *, shared: bool = False) -> None:
        self.registered = registered
        self.shared = shared
        self.conflicts = 0
        self.others: Counter[int] = Counter()
        self._own: int | None = None

    def judge(self, rank: int | None) -> Owner:
        """Whose a message is. rank: what its batch says, None when it says nothing."""
        if self.shared:
            return Owner.OWN if (rank or 0) == self.registered else self._other(rank or 0)
        if rank is None:
            return Owner.OWN
        if self._own is None:
            self._own = rank
        if rank == self._own:
            self.conflicts += rank != self.registered
            return Owner.OWN
        if rank == self.registered:
            self._own = rank
            return Owner.FOUND
        return self._other(rank)

    def reset(self) -> None:
        """The publisher may be another process now."""
        self._own = None

    def _other(self, rank: int) -> Owner:
        if rank in self.others or len(self.others) < MAX_RANKS_SHOWN:
            self.others[rank] += 1
        return Owner.OTHER
