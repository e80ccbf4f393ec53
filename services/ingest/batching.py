"""A publisher's messages on their way to NATS: collected into batches, in order, bounded (pure).

A batch never spans a gap, a restart or a new generation, so its numbers are consecutive. The head batch stays until it
is confirmed, and is the same bytes whenever it is sent again.
"""

from collections import deque
from collections.abc import Iterator

from schemas.events import Event, Removed, Stored
from services.ingest.pending import BATCH_OVERHEAD_BYTES, Mark, Message, PendingBatch

EVENT_OVERHEAD_BYTES = 64
HASH_BYTES = 8


def event_bytes(event: Event) -> int:
    """An estimate of an event's encoded size, never far below it."""
    size = EVENT_OVERHEAD_BYTES + len(event.backend_id) + len(event.model) + len(event.tenant)
    if isinstance(event, Stored):
        return size + len(event.engine_hashes) + len(event.content_hashes)
    return size + len(event.engine_hashes) if isinstance(event, Removed) else size


def split_event(event: Event, max_bytes: int) -> Iterator[Event]:
    """The event in pieces of at most ``max_bytes`` (at least one block each); a chain goes on across its pieces."""
    if event_bytes(event) <= max_bytes or not isinstance(event, Stored | Removed):
        yield event
        return
    hashes = event.engine_hashes
    fixed = event_bytes(event) - len(hashes)
    if isinstance(event, Removed):
        step = max(1, (max_bytes - fixed) // HASH_BYTES) * HASH_BYTES
        for start in range(0, len(hashes), step):
            yield Removed(event.tier, hashes[start : start + step], event.backend_id, event.model, event.tenant)
        return
    content = event.content_hashes
    width = 2 if content else 1
    step = max(1, (max_bytes - fixed + len(content)) // (HASH_BYTES * width)) * HASH_BYTES
    parent = event.parent
    for start in range(0, len(hashes), step):
        piece = hashes[start : start + step]
        yield Stored(
            event.tier,
            piece,
            parent,
            content[start : start + step],
            event.root,
            event.block_size,
            event.backend_id,
            event.model,
            event.tenant,
        )
        if content or parent is not None:
            parent = int.from_bytes(piece[-HASH_BYTES:], "little")


class BatchBuffer:
    """The batches of one publisher, oldest first. ``bytes`` is an estimate of what they hold."""

    def __init__(self, max_batch_events: int, max_batch_bytes: int) -> None:
        self.max_batch_events = max_batch_events
        self.max_batch_bytes = max_batch_bytes
        self.bytes = 0
        self._batches: deque[PendingBatch] = deque()
        self._head_taken = False

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def messages(self) -> int:
        """Messages that wait in all batches."""
        return sum(batch.messages for batch in self._batches)

    def append(self, message: Message) -> None:
        """Add a message behind everything before it."""
        size = sum(map(event_bytes, message.events))
        if size <= self.max_batch_bytes - BATCH_OVERHEAD_BYTES and len(message.events) <= self.max_batch_events:
            batch = self._open(message, size)
            self._extend(batch, message.events, size)
        else:
            batch = self._append_in_parts(message)
            size = batch.bytes - BATCH_OVERHEAD_BYTES
        batch.messages += message.messages
        batch.accepted += message.accepted
        batch.blocks += message.blocks
        batch.marks.append(
            Mark(
                message.seq,
                message.published_at,
                message.received_at,
                message.fingerprint,
                len(batch.events) if batch.split else len(message.events),
                size,
                message.messages,
                message.accepted,
                message.blocks,
            )
        )

    def drop_covered(self, generation: int, last_seq: int, last_published_at: float) -> list[Mark]:
        """Take out what is stored already: all of older generations, and of this one up to a number and its time.

        Of a message that is split only part may be stored, so it goes when a later one is. Numbers that began anew
        within a generation are told by their times.
        """
        dropped: list[Mark] = []
        kept: deque[PendingBatch] = deque()
        for batch in self._batches:
            before = batch.bytes
            if batch.generation < generation:
                dropped += batch.marks
                self.bytes -= before
                continue
            if batch.generation == generation and (not batch.split or batch.last_seq < last_seq):
                removed = batch.drop_up_to(last_seq, last_published_at)
                dropped += removed
                if not batch.marks and (removed or batch.last_seq < last_seq):
                    self.bytes -= before
                    continue
                self.bytes -= before - batch.bytes
            kept.append(batch)
        self._batches = kept
        self._head_taken = False
        return dropped

    def head(self) -> PendingBatch | None:
        """The batch to send next (or again); it is closed by this and stays until ``confirm`` or ``drop``."""
        if not self._batches:
            return None
        self._head_taken = True
        return self._batches[0]

    def confirm(self) -> PendingBatch:
        """Forget the head: it is stored, or given up."""
        batch = self._batches.popleft()
        self.bytes -= batch.bytes
        self._head_taken = False
        return batch

    def drop_all(self) -> list[PendingBatch]:
        """Empty the buffer (its publisher is gone)."""
        dropped = list(self._batches)
        self._batches.clear()
        self.bytes = 0
        self._head_taken = False
        return dropped

    def _open(self, message: Message, size: int) -> PendingBatch:
        if self._batches and not (self._head_taken and len(self._batches) == 1):
            batch = self._batches[-1]
            if (
                message.seq == batch.last_seq + 1
                and message.generation == batch.generation
                and not batch.split
                and batch.bytes + size <= self.max_batch_bytes
                and len(batch.events) + len(message.events) <= self.max_batch_events
            ):
                batch.last_seq = message.seq
                return batch
        return self._new(message)

    def _new(self, message: Message, part: int = 0, *, split: bool = False) -> PendingBatch:
        batch = PendingBatch(
            generation=message.generation,
            first_seq=message.seq,
            last_seq=message.seq,
            published_at=message.published_at,
            received_at=message.received_at,
            part=part,
            missing=message.missing,
            split=split,
        )
        self._batches.append(batch)
        self.bytes += batch.bytes
        return batch

    def _extend(self, batch: PendingBatch, events: list[Event], size: int) -> None:
        batch.events.extend(events)
        batch.bytes += size
        self.bytes += size

    def _append_in_parts(self, message: Message) -> PendingBatch:
        """The same parts whatever was in the buffer before, so that replicas of ingest cut alike."""
        limit = self.max_batch_bytes - BATCH_OVERHEAD_BYTES
        batch = self._new(message, split=True)
        for event in message.events:
            for piece in split_event(event, limit):
                size = event_bytes(piece)
                if batch.events and (
                    batch.bytes + size > self.max_batch_bytes or len(batch.events) >= self.max_batch_events
                ):
                    batch = self._new(message, part=batch.part + 1, split=True)
                self._extend(batch, [piece], size)
        return batch
