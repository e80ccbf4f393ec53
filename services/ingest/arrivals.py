"""A publisher's messages before and after their numbers were judged (pure)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


@dataclass(slots=True)
class Incoming:
    """A message of a publisher as it came in.

    fingerprint: a hash of its payload. published_at: the publisher's own time, received_at: ours, both in seconds since
    the epoch (0 unknown). size: bytes it holds while it waits. body: what it says, None for a message that cannot be
    read. warm: it can only have been sent by a publisher whose cache was not empty. replayed: it came from a replay.
    """

    seq: int
    fingerprint: int = 0
    published_at: float = 0.0
    received_at: float = 0.0
    size: int = 0
    body: Any = None
    warm: bool = False
    replayed: bool = False


class Arrival(StrEnum):
    """What becomes of a message. NEXT to COUNTER_RESET go on, the others are dropped.

    gap: numbers before it are missing for good. restart: the first of a new life. counter_reset: the numbers began
    anew, the publisher did not. duplicate: taken before. late: newer ones were taken already. replayed: a replay's copy
    of what was taken. waiting_full: no room to wait; a replay brings it again. buffer_full: no room on the way to NATS.
    unreadable: it cannot be read, a replay may bring a better copy. old_life: it waited, and its publisher began anew.
    """

    NEXT = "next"
    GAP = "gap"
    RESTART = "restart"
    COUNTER_RESET = "counter_reset"
    DUPLICATE = "duplicate"
    LATE = "late"
    REPLAYED = "replayed"
    WAITING_FULL = "waiting_full"
    BUFFER_FULL = "buffer_full"
    UNREADABLE = "unreadable"
    OLD_LIFE = "old_life"


GOES_ON = frozenset((Arrival.NEXT, Arrival.GAP, Arrival.RESTART, Arrival.COUNTER_RESET))


class Verdict(NamedTuple):
    """What becomes of a message."""

    message: Incoming
    arrival: Arrival


@dataclass(slots=True)
class Lifetime:
    """The generation of an instance's rank, shared by all its sockets (milliseconds since the epoch)."""

    generation: int


@dataclass(slots=True)
class Round:
    """One replay under way. start: the number asked for. overlap: the newest message taken came again, unchanged."""

    start: int
    answered: bool = False
    overlap: bool = False
    progressed: bool = False
    whole: bool = False
