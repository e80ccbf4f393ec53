"""What is said of a stream: its state word, why, and how much of it is there (pure)."""

from typing import TYPE_CHECKING

from schemas.streams import StreamState

if TYPE_CHECKING:
    from services.ingest.stream import Stream


def state_of(stream: "Stream") -> StreamState:
    """The state word, worst first."""
    if stream.lost_connection:
        return StreamState.STALE
    if stream.starved:
        return StreamState.GAPPED
    if stream.repairing and stream.connected:
        return StreamState.RECOVERING
    if stream.incomplete:
        return StreamState.GAPPED
    if stream.unverified or not stream.heard:
        return StreamState.UNKNOWN
    return StreamState.LIVE


def reason_of(stream: "Stream") -> str:
    """Why the stream is not live, in a few words; empty when it is."""
    missing = f"{stream.missed} messages missing" if stream.missed else stream.why
    return {
        StreamState.STALE: "connection lost",
        StreamState.RECOVERING: "replaying",
        StreamState.GAPPED: "NATS takes nothing, the buffer is full" if stream.starved else missing,
        StreamState.UNKNOWN: "nothing heard since it connected again" if stream.unverified else "nothing heard yet",
        StreamState.LIVE: "",
    }[state_of(stream)]


def coverage_of(stream: "Stream") -> float:
    """Part of the numbers of this life that were taken, 0 to 1; 1 for a life that certainly sent nothing yet."""
    if stream.last_seq is None and stream.highest is None:
        return 1.0 if stream.heard else 0.0
    known = max(stream.last_seq if stream.last_seq is not None else -1, stream.highest or 0) + 1
    taken = 0 if stream.last_seq is None else stream.last_seq + 1 - stream.missed
    return min(1.0, max(0.0, taken / known))
