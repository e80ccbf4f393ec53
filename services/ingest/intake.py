"""One publisher's way through ingest: frames in, translated messages into its buffer, everything counted."""

from collections.abc import Sequence

import xxhash

from schemas.blocks import Tier
from schemas.events import Cleared, Event, EventBatch
from schemas.wire.frames import ReplayMessage
from schemas.wire.types import Rejected, RejectReason, WireBatch, WireCleared, WireError
from schemas.wire.vllm import GroupFilter
from services.ingest.arrivals import GOES_ON, Arrival, Incoming, Verdict
from services.ingest.batching import BatchBuffer
from services.ingest.canonical import canonicalise
from services.ingest.counts import Counts
from services.ingest.cursors import Cursor
from services.ingest.decode import decode_frames, decode_payload, proves_warm_cache
from services.ingest.outcomes import MemoryBudget, Outcome
from services.ingest.pending import Message, PendingBatch
from services.ingest.ranks import Owner, RankGate
from services.ingest.registrations import Publisher
from services.ingest.repair import RepairPolicy, replayed, resync, round_ended
from services.ingest.stream import Stream

# What waits is decoded: objects take more room than their bytes did.
HELD_OVERHEAD_BYTES = 512
HELD_GROWTH = 2

DROPPED_OTHER_RANK = "other_rank"
DROPPED_UNREGISTERED = "unregistered"
DROPPED_SHUTDOWN = "shutdown"
DROPPED_STORED_BY_ANOTHER = "stored_by_another"

# A refusal for one of these means that the index may differ from the publisher's cache; for the others it does not.
REFUSALS_THAT_MATTER = frozenset(
    (
        RejectReason.BLOCK_SIZE_MISMATCH,
        RejectReason.BAD_HASH,
        RejectReason.WRONG_TYPE,
        RejectReason.MISSING_FIELD,
        RejectReason.UNKNOWN_EVENT,
        RejectReason.LIMIT,
    )
)


class Intake:
    """State of one publisher. Its methods return what became of messages, of those that had waited too."""

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
        self.ranks = RankGate(publisher.record.dp_rank, shared=publisher.shared)
        self.last_received_at = 0.0
        self.last_published_at = 0.0
        self._budget = budget
        self._max_buffer_bytes = max_buffer_bytes
        self._max_payload_bytes = max_payload_bytes
        self._groups = GroupFilter()
        self._held_bytes = 0
        self._told_generation = stream.generation
        self.published_up_to: Cursor | None = None
        self.times_overtaken = 0

    @property
    def has_room(self) -> bool:
        """Whether a message can be kept until it is sent."""
        return self.buffer.bytes < self._max_buffer_bytes and self._budget.used < self._budget.limit

    @property
    def has_room_again(self) -> bool:
        """Whether so much was sent meanwhile that asking for what was turned away makes sense."""
        return self.buffer.bytes < self._max_buffer_bytes // 2 and self._budget.used < self._budget.limit * 3 // 4

    @property
    def unaccounted(self) -> int:
        """Messages of which nobody knows what became of them; anything but 0 is a fault of ours."""
        return self.counts.messages.pending - len(self.stream.held) - self.buffer.messages

    def handle(self, frames: Sequence[bytes], now: float) -> list[Outcome]:
        """Take one live ZMQ message. Never raises for what a publisher sent. now: seconds since the epoch."""
        self.counts.messages.received += 1
        self.last_received_at = now
        try:
            seq, payload = decode_frames(frames, self._max_payload_bytes)
        except WireError as error:
            return [self._refuse(-1, error)]
        return self._judge(seq, payload, now, from_replay=False)

    def handle_replayed(self, message: ReplayMessage, now: float) -> list[Outcome]:
        """Take one message of the replay under way."""
        self.counts.messages.received += 1
        return self._judge(message.seq, message.payload, now, from_replay=True)

    def refuse_replayed(self, error: WireError) -> list[Outcome]:
        """A reply to a replay cannot be read."""
        self.counts.messages.received += 1
        return [self._refuse(-1, error)]

    def replay_ended(self, complete: bool, now: float, policy: RepairPolicy) -> list[Outcome]:
        """The replay under way is over (services.ingest.repair.round_ended)."""
        return self._conclude_all(round_ended(self.stream, complete, now, policy), now)

    def resync(self, now: float) -> list[Outcome]:
        """Begin a new generation from what the publisher can still tell; without a replay, mark what is held."""
        if not self.stream.repairable:
            self.stream.lost("a resync was asked for, and there is no replay")
            return []
        return self._conclude_all(resync(self.stream), now)

    def renew(self, now: float) -> list[Outcome]:
        """The lifetime has a new generation."""
        self._told_generation = self.stream.lifetime.generation
        return self._conclude_all(self.stream.renew(), now)

    def continue_from(self, cursor: Cursor | None) -> None:
        """Take over the lifetime's generation, behind what was published in it; None when nobody knows how far."""
        stream = self.stream
        self._told_generation = stream.generation = stream.lifetime.generation
        stream.new_life = False
        if cursor is None:
            stream.begin()
        else:
            stream.resume(cursor.last_seq, cursor.last_fingerprint, cursor.published_at, cursor.missing)
        if stream.repairable and stream.connected:
            stream.ask()

    def connected(self, connected: bool, now: float) -> list[Outcome]:
        """The connection changed."""
        if connected:
            self.ranks.reset()
        return self._conclude_all(self.stream.set_connected(connected), now)

    def discard(self, reason: str) -> None:
        """Drop what is buffered and what waits, counted by reason."""
        before = self.buffer.bytes
        for batch in self.buffer.drop_all():
            self._count_dropped(batch, reason)
        self._budget.used -= before
        self.counts.messages.dropped[reason] += len(self.stream.held.drop_all())
        self._account_held()

    def batch_stored(self, batch: PendingBatch) -> None:
        """A batch of the buffer is safe in the stream."""
        self._budget.used -= batch.bytes
        self.counts.messages.published += batch.messages
        self.counts.events.published += batch.accepted
        self.counts.blocks += batch.blocks
        self.published_up_to = batch.cursor()

    def batch_refused(self, batch: PendingBatch, reason: str) -> None:
        """A batch of the buffer can never be stored."""
        self._budget.used -= batch.bytes
        self._count_dropped(batch, reason)
        self.stream.lost(reason)

    def overtaken(self, stored: EventBatch) -> None:
        """Another ingest has stored a batch of this publisher since: drop what it covers, follow its generation."""
        self.times_overtaken += 1
        before = self.buffer.bytes
        for mark in self.buffer.drop_covered(stored.generation, stored.last_seq, stored.last_published_at):
            self.counts.messages.dropped[DROPPED_STORED_BY_ANOTHER] += mark.messages
            self.counts.events.dropped[DROPPED_STORED_BY_ANOTHER] += mark.accepted
        self._budget.used -= before - self.buffer.bytes
        stream = self.stream
        if stored.generation > stream.lifetime.generation:
            stream.lifetime.generation = stored.generation
            if held := stream.held.drop_all():
                self.counts.messages.dropped[Arrival.OLD_LIFE] += len(held)
                self._account_held()
            self.continue_from(Cursor.of(stored))
        elif stored.generation == stream.generation and stored.missing > stream.missed:
            stream.miss(stored.missing - stream.missed)

    def _judge(self, seq: int, payload: bytes, now: float, *, from_replay: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        message = Incoming(seq, xxhash.xxh3_64_intdigest(payload), received_at=now, replayed=from_replay)
        message.size = HELD_OVERHEAD_BYTES + HELD_GROWTH * len(payload)
        try:
            batch = decode_payload(self.publisher, payload)
        except WireError as error:
            outcomes.append(self._refuse(seq, error))
        else:
            message.body, message.published_at = batch, batch.timestamp
            message.warm = seq == 0 and self.publisher.dialect == "vllm" and proves_warm_cache(batch)
            owner = self.ranks.judge(batch.dp_rank) if self.publisher.dialect == "vllm" else Owner.OWN
            self.counts.rank_conflicts = self.ranks.conflicts
            if owner is Owner.OTHER:
                self.counts.messages.dropped[DROPPED_OTHER_RANK] += 1
                return [Outcome(seq, dropped=DROPPED_OTHER_RANK)]
            if owner is Owner.FOUND:
                outcomes += self._conclude_all(self.stream.end_life(), now)
        if from_replay:
            verdicts = replayed(self.stream, message, room=self.has_room)
        else:
            verdicts = self.stream.live(message, room=self.has_room)
        return outcomes + self._conclude_all(verdicts, now)

    def _refuse(self, seq: int, error: WireError) -> Outcome:
        self.counts.messages.rejected[error.reason] += 1
        return Outcome(seq, rejected=(Rejected(-1, error.reason, error.detail),))

    def _conclude_all(self, verdicts: list[Verdict], now: float) -> list[Outcome]:
        outcomes = [self._conclude(verdict) for verdict in verdicts]
        if self.stream.primary and self.stream.generation > self._told_generation:
            self._announce(now, [])
        self._account_held()
        return outcomes

    def _conclude(self, verdict: Verdict) -> Outcome:
        message, arrival = verdict.message, verdict.arrival
        if arrival is Arrival.RESTART:
            self._groups = GroupFilter()
        if arrival not in GOES_ON:
            if message.body is not None:
                self.counts.messages.dropped[arrival] += 1
            return Outcome(message.seq, arrival, dropped=arrival)
        if message.body is None:
            if arrival is Arrival.RESTART and not self.stream.primary:
                self._announce(message.received_at, [Cleared(self.publisher.tiers)])
            return Outcome(message.seq, arrival)
        return self._take(message, arrival)

    def _take(self, message: Incoming, arrival: Arrival) -> Outcome:
        counts, stream = self.counts, self.stream
        batch: WireBatch = message.body
        if self.publisher.dialect == "vllm":
            batch = self._groups.apply(batch)
        translated = canonicalise(batch.events, self.publisher)
        counts.events.received += len(batch.events) + len(batch.rejected)
        rejected = [*batch.rejected, *translated.rejected] if batch.rejected else translated.rejected
        for refusal in rejected:
            counts.events.rejected[refusal.reason] += 1
        if translated.block_size_seen:
            counts.block_size_seen = translated.block_size_seen
        if batch.timestamp:
            self.last_published_at = batch.timestamp
        if self._empties_all(batch):
            stream.made_whole()
        for refusal in rejected:
            if refusal.reason in REFUSALS_THAT_MATTER:
                stream.refused(f"events refused: {refusal.reason}")
        events = translated.events
        if arrival is Arrival.RESTART and not stream.primary:
            events = [Cleared(self.publisher.tiers), *events]
        self._append(
            Message(
                message.seq,
                stream.generation,
                batch.timestamp,
                message.received_at,
                events,
                translated.accepted,
                translated.blocks,
                fingerprint=message.fingerprint,
                missing=stream.missed,
            )
        )
        return Outcome(message.seq, arrival, events, translated.blocks, buffered=True, rejected=rejected)

    def _empties_all(self, batch: WireBatch) -> bool:
        """Whether a message says that nothing is left of all that this publisher holds."""
        record = self.publisher.record
        return (
            self.publisher.dialect == "vllm"
            and record.kind == "engine"
            and not record.own_tiers
            and any(isinstance(event, WireCleared) and event.tier in (None, Tier.NPU) for event in batch.events)
        )

    def _announce(self, now: float, events: list[Event]) -> None:
        """Say that a new life began, before (or without) anything of it."""
        seq = self.stream.last_seq if self.stream.last_seq is not None else -1
        self._append(Message(seq, self.stream.generation, 0.0, now, events, messages=0, missing=self.stream.missed))

    def _append(self, message: Message) -> None:
        self._told_generation = message.generation
        before = self.buffer.bytes
        self.buffer.append(message)
        self._budget.used += self.buffer.bytes - before

    def _account_held(self) -> None:
        self._budget.used += self.stream.held.bytes - self._held_bytes
        self._held_bytes = self.stream.held.bytes

    def _count_dropped(self, batch: PendingBatch, reason: str) -> None:
        self.counts.messages.dropped[reason] += batch.messages
        self.counts.events.dropped[reason] += batch.accepted
