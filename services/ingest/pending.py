"""A publisher's messages after translation, and the batches they are collected into (pure)."""

from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.events import WIRE_VERSION, Event, EventBatch
from schemas.registry import StoreBackend
from services.ingest.cursors import Cursor
from services.ingest.registrations import Publisher

BATCH_OVERHEAD_BYTES = 512


@dataclass(slots=True)
class Message:
    """One message of a publisher after translation.

    accepted: wire events behind ``events``. messages: 0 for a message that only announces a new generation.
    fingerprint: of its payload. missing: numbers of this generation known to be missing so far.
    """

    seq: int
    generation: int
    published_at: float
    received_at: float
    events: list[Event]
    accepted: int = 0
    blocks: int = 0
    messages: int = 1
    fingerprint: int = 0
    missing: int = 0


class Mark(NamedTuple):
    """What one message added to a batch."""

    seq: int
    published_at: float
    received_at: float
    fingerprint: int
    events: int
    bytes: int
    messages: int
    accepted: int
    blocks: int


@dataclass(slots=True)
class PendingBatch:
    """Consecutive messages that will be one body; marks tells one from another.

    A message that is too large for one body has bodies to itself, numbered by part.
    """

    generation: int
    first_seq: int
    last_seq: int
    published_at: float
    received_at: float
    part: int = 0
    events: list[Event] = field(default_factory=list)
    bytes: int = BATCH_OVERHEAD_BYTES
    messages: int = 0
    accepted: int = 0
    blocks: int = 0
    missing: int = 0
    split: bool = False
    marks: list[Mark] = field(default_factory=list)

    def body(self, publisher: Publisher) -> EventBatch:
        """The canonical batch; own_tiers and counted are the registration's."""
        record = publisher.record
        own_tiers = () if record.kind == "pool" else record.own_tiers
        return EventBatch(
            version=WIRE_VERSION,
            source=publisher.key.source,
            model=record.model,
            tenant=record.tenant,
            instance_id=record.instance_id,
            dp_rank=record.dp_rank,
            generation=self.generation,
            first_seq=self.first_seq,
            last_seq=self.last_seq,
            published_at=self.published_at,
            received_at=self.received_at,
            events=self.events,
            own_tiers=own_tiers,
            counted=record.kind == "engine" and record.counted,
            pool_expected=record.kind == "pool" or record.store_backend != StoreBackend.NONE,
            last_fingerprint=self.marks[-1].fingerprint if self.marks else 0,
            last_published_at=self.marks[-1].published_at if self.marks else self.published_at,
            missing=self.missing,
        )

    def cursor(self) -> Cursor:
        """Where this batch ends."""
        last = self.marks[-1] if self.marks else None
        return Cursor(
            generation=self.generation,
            last_seq=self.last_seq,
            last_fingerprint=last.fingerprint if last else 0,
            published_at=last.published_at if last else self.published_at,
            missing=self.missing,
        )

    def drop_up_to(self, seq: int, published_at: float) -> list[Mark]:
        """Take out the messages up to a number, and up to a time where both are known."""
        dropped = [
            mark
            for mark in self.marks
            if mark.seq <= seq and not (published_at and mark.published_at and mark.published_at > published_at)
        ]
        self.marks = self.marks[len(dropped) :]
        self.events = self.events[sum(mark.events for mark in dropped) :]
        self.bytes -= sum(mark.bytes for mark in dropped)
        self.messages -= sum(mark.messages for mark in dropped)
        self.accepted -= sum(mark.accepted for mark in dropped)
        self.blocks -= sum(mark.blocks for mark in dropped)
        if dropped and self.marks:
            first = self.marks[0]
            self.first_seq, self.published_at, self.received_at = first.seq, first.published_at, first.received_at
        return dropped
