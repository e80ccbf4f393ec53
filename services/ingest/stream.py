"""Sequence and generation of one publisher: what a message's number means (design 6).

Within a generation numbers are consecutive. A number that was seen before is either the same message again (equal
payload: a duplicate) or the sign of a new life of the publisher; the payload carries a time, so a new life never
repeats an old message. A new life is a new generation: everything the publisher held is gone, with no event sent.

States: ``unknown`` nothing heard in this generation; ``live`` complete so far; ``gapped`` something is missing;
``recovering`` a repair runs; ``stale`` the connection is lost.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from schemas.streams import StreamState

DUPLICATE_WINDOW = 256
MAX_CLOCK_SKEW_MS = 300_000
FIRST_SEQUENCES = (0, 1)  # vLLM counts from 0, the memcache MetaService from 1


class Arrival(StrEnum):
    """What the number of a message says."""

    NEXT = "next"
    GAP = "gap"
    RESTART = "restart"
    DUPLICATE = "duplicate"


@dataclass(slots=True)
class Lifetime:
    """The generation of an instance's rank, shared by all its sockets (milliseconds since the epoch)."""

    generation: int


class Stream:
    """The sequence bookkeeping of one socket.

    A primary stream owns the generation: its restart raises it. A further socket of the same instance restarts on its
    own, and is gapped when the primary's new generation has taken its holdings away.

    first_seq, last_seq: of the current life, None before its first message. missed: numbers never seen in this life;
    missed_before_join: those of them that passed before the first message. gaps, restarts, missed_total: since start.
    """

    def __init__(self, lifetime: Lifetime, *, primary: bool = True) -> None:
        self.lifetime = lifetime
        self.primary = primary
        self.generation = lifetime.generation
        self.gaps = 0
        self.missed_total = 0
        self.restarts = 0
        self.connected = False
        self.lost_connection = False
        self._begin()

    def _begin(self) -> None:
        self.first_seq: int | None = None
        self.last_seq: int | None = None
        self.missed = 0
        self.missed_before_join = 0
        self.incomplete = False
        self.recovering = False
        self._seen: deque[tuple[int, int]] = deque(maxlen=DUPLICATE_WINDOW)

    def resume(self, last_seq: int) -> None:
        """Go on where an earlier ingest stopped, so that what passed meanwhile shows as a gap or a restart."""
        self.last_seq = last_seq

    def renew(self) -> None:
        """Begin afresh in the lifetime's generation (a new registration)."""
        self.generation = self.lifetime.generation
        self._begin()

    def observe(self, seq: int, fingerprint: int) -> Arrival:
        """Judge the number of a live message. fingerprint: a hash of its payload.

        After RESTART the message is not yet taken: the caller calls ``restart``.
        """
        if self.generation != self.lifetime.generation:
            self.generation = self.lifetime.generation
            if self.first_seq is not None:
                self.lost()
        last = self.last_seq
        if last is None:
            arrival = Arrival.NEXT
            if seq not in FIRST_SEQUENCES:
                arrival = Arrival.GAP
                self.missed_before_join = seq
                self._miss(seq)
        elif seq == last + 1:
            arrival = Arrival.NEXT
        elif seq > last:
            arrival = Arrival.GAP
            self._miss(seq - last - 1)
        elif (seq, fingerprint) in self._seen:
            return Arrival.DUPLICATE
        else:
            return Arrival.RESTART
        self._accept(seq, fingerprint)
        return arrival

    def restart(self, seq: int, fingerprint: int, published_at: float, now: float) -> Arrival:
        """Begin a new life with this message. Answers GAP when that life had sent something before, else NEXT.

        The new generation is the message's own time (replicas of ingest agree on it), or ``now`` when the publisher's
        clock cannot be right; always above the one before, and not in the future, so that an unregistration retires
        it. Both in seconds since the epoch.
        """
        if self.primary:
            published_ms, now_ms = int(published_at * 1000), int(now * 1000)
            began = min(published_ms, now_ms) if abs(published_ms - now_ms) <= MAX_CLOCK_SKEW_MS else now_ms
            self.lifetime.generation = self.generation = max(self.generation + 1, began)
        self.restarts += 1
        self._begin()
        return self.observe(seq, fingerprint)

    def lost(self) -> None:
        """Something of this life was lost on our side: the stream is gapped until it is repaired."""
        self.incomplete = True
        self.gaps += 1

    def set_connected(self, connected: bool) -> None:
        """What the socket's monitor saw; a publisher that was never connected is not lost but unknown."""
        if connected:
            self.lost_connection = False
        elif self.connected:
            self.lost_connection = True
        self.connected = connected

    @property
    def state(self) -> StreamState:
        """The state word, worst first."""
        if self.lost_connection:
            return StreamState.STALE
        if self.recovering:
            return StreamState.RECOVERING
        if self.incomplete:
            return StreamState.GAPPED
        return StreamState.UNKNOWN if self.first_seq is None else StreamState.LIVE

    @property
    def reason(self) -> str:
        """Why the stream is not live, in a few words; empty when it is."""
        return {
            StreamState.STALE: "connection lost",
            StreamState.RECOVERING: "replaying",
            StreamState.GAPPED: f"{self.missed} messages missing" if self.missed else "messages lost on the way",
            StreamState.UNKNOWN: "nothing heard yet",
            StreamState.LIVE: "",
        }[self.state]

    @property
    def coverage(self) -> float:
        """Part of the numbers of this life that were taken, 0 to 1."""
        if self.last_seq is None:
            return 0.0
        return max(0.0, 1.0 - self.missed / (self.last_seq + 1))

    def _miss(self, count: int) -> None:
        self.incomplete = True
        self.gaps += 1
        self.missed += count
        self.missed_total += count

    def _accept(self, seq: int, fingerprint: int) -> None:
        if self.first_seq is None:
            self.first_seq = seq
        self.last_seq = seq
        self._seen.append((seq, fingerprint))
