"""One publisher's way through ingest: frames in, translated messages into its buffer, everything counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from schemas.events import Cleared, Event
from schemas.wire.types import Rejected, RejectReason, WireBatch, WireError
from schemas.wire.vllm import GroupFilter
from services.ingest.batching import BatchBuffer, Message, PendingBatch
from services.ingest.canonical import canonicalise
from services.ingest.counts import Counts
from services.ingest.decode import decode_frames, decode_payload
from services.ingest.registrations import Publisher
from services.ingest.stream import Arrival, Stream

END_OF_REPLAY = (1 << 64) - 1

DROPPED_DUPLICATE = "duplicate"
DROPPED_BUFFER_FULL = "buffer_full"
DROPPED_UNREGISTERED = "unregistered"
DROPPED_SHUTDOWN = "shutdown"


@dataclass(slots=True)
class MemoryBudget:
    """Bytes that all buffers may hold together."""

    limit: int
    used: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of one message, for logs and taps. seq -1: it had none that could be read."""

    seq: int = -1
    arrival: Arrival | None = None
    events: Sequence[Event] = ()
    blocks: int = 0
    buffered: bool = False
    rejected: Sequence[Rejected] = ()
    dropped: str = ""


class Intake:
    """State of one publisher."""

    def __init__(
        self,
        publisher: Publisher,
        stream: Stream,
        buffer: BatchBuffer,
        budget: MemoryBudget,
        max_buffer_bytes: int,
        max_payload_bytes: int,
    ) -> None:
        self.publisher = publisher
        self.stream = stream
        self.buffer = buffer
        self.counts = Counts()
        self.last_received_at = 0.0
        self.last_published_at = 0.0
        self._budget = budget
        self._max_buffer_bytes = max_buffer_bytes
        self._max_payload_bytes = max_payload_bytes
        self._groups = GroupFilter()

    def handle(self, frames: Sequence[bytes], now: float) -> Outcome:
        """Take one ZMQ message. Never raises for what a publisher sent. now: seconds since the epoch."""
        messages = self.counts.messages
        messages.received += 1
        self.last_received_at = now
        try:
            seq, payload = decode_frames(frames, self._max_payload_bytes)
            if seq == END_OF_REPLAY:
                raise WireError(RejectReason.SEQUENCE_WIDTH, "sequence 2^64-1 ends a replay and names no message")
        except WireError as error:
            messages.rejected[error.reason] += 1
            return Outcome(rejected=(Rejected(-1, error.reason, error.detail),))
        fingerprint = xxhash.xxh3_64_intdigest(payload)
        arrival = self.stream.observe(seq, fingerprint)
        if arrival is Arrival.DUPLICATE:
            messages.dropped[DROPPED_DUPLICATE] += 1
            return Outcome(seq, arrival, dropped=DROPPED_DUPLICATE)
        try:
            batch = decode_payload(self.publisher, payload)
        except WireError as error:
            if arrival is Arrival.RESTART:
                self.stream.restart(seq, fingerprint, 0.0, now)
                self._append(Message(seq, self.stream.generation, 0.0, now, self._clear_own(), messages=0))
            messages.rejected[error.reason] += 1
            return Outcome(seq, arrival, rejected=(Rejected(-1, error.reason, error.detail),))
        if self.publisher.dialect == "vllm":
            batch = self._groups.apply(batch)
        if arrival is Arrival.RESTART:
            self.stream.restart(seq, fingerprint, batch.timestamp, now)
        return self._take(seq, arrival, batch, now)

    def discard(self, reason: str) -> None:
        """Drop what is buffered, counted by reason."""
        before = self.buffer.bytes
        for batch in self.buffer.drop_all():
            self._count_dropped(batch, reason)
        self._budget.used -= before

    def batch_stored(self, batch: PendingBatch) -> None:
        """A batch of the buffer is safe in the stream."""
        self._budget.used -= batch.bytes
        self.counts.messages.published += batch.messages
        self.counts.events.published += batch.accepted
        self.counts.blocks += batch.blocks

    def batch_refused(self, batch: PendingBatch, reason: str) -> None:
        """A batch of the buffer can never be stored."""
        self._budget.used -= batch.bytes
        self._count_dropped(batch, reason)
        self.stream.lost()

    def _take(self, seq: int, arrival: Arrival, batch: WireBatch, now: float) -> Outcome:
        counts = self.counts
        if (
            self.publisher.dialect == "vllm"
            and batch.dp_rank is not None
            and batch.dp_rank != self.publisher.record.dp_rank
        ):
            counts.rank_conflicts += 1
        translated = canonicalise(batch.events, self.publisher)
        counts.events.received += len(batch.events) + len(batch.rejected)
        rejected = [*batch.rejected, *translated.rejected] if batch.rejected else translated.rejected
        for refusal in rejected:
            counts.events.rejected[refusal.reason] += 1
        if translated.block_size_seen:
            counts.block_size_seen = translated.block_size_seen
        if batch.timestamp:
            self.last_published_at = batch.timestamp
        events = translated.events
        if arrival is Arrival.RESTART:
            events = self._clear_own() + events
        message = Message(
            seq, self.stream.generation, batch.timestamp, now, events, translated.accepted, translated.blocks
        )
        outcome = Outcome(seq, arrival, events, translated.blocks, rejected=rejected)
        if self.buffer.bytes >= self._max_buffer_bytes or self._budget.used >= self._budget.limit:
            counts.messages.dropped[DROPPED_BUFFER_FULL] += 1
            counts.events.dropped[DROPPED_BUFFER_FULL] += translated.accepted
            self.stream.lost()
            outcome.dropped = DROPPED_BUFFER_FULL
            return outcome
        self._append(message)
        outcome.buffered = True
        return outcome

    def _append(self, message: Message) -> None:
        before = self.buffer.bytes
        self.buffer.append(message)
        self._budget.used += self.buffer.bytes - before

    def _clear_own(self) -> list[Event]:
        """What a restart clears: a primary's new generation does it, a further socket says it."""
        return [] if self.publisher.primary else [Cleared(self.publisher.tiers)]

    def _count_dropped(self, batch: PendingBatch, reason: str) -> None:
        self.counts.messages.dropped[reason] += batch.messages
        self.counts.events.dropped[reason] += batch.accepted
