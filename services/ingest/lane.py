"""One publisher's way to its subject, and what the stream keeps of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from schemas.events import BodyError, EventBatch, decode_event_batch
from schemas.subjects import EVENTS_STREAM, escape, events_subject
from services.ingest.batching import BatchBuffer
from services.ingest.pending import PendingBatch
from services.ingest.registrations import Publisher


@dataclass(slots=True)
class Sent:
    """A batch on its way. number: by which its acknowledgement is known; times of a monotonic clock, in seconds."""

    body: bytes
    number: int
    first_at: float
    at: float
    failed: bool = False


class Lane:
    """The way of one publisher's batches to its subject.

    newest: stream sequence of the subject's newest message, 0 when there is none, None while unknown.
    """

    def __init__(
        self,
        number: int,
        publisher: Publisher,
        buffer: BatchBuffer,
        on_stored: Callable[[PendingBatch], None],
        on_refused: Callable[[PendingBatch, str], None],
        on_overtaken: Callable[[EventBatch], None],
    ) -> None:
        self.number = number
        self.publisher = publisher
        self.buffer = buffer
        self.on_stored = on_stored
        self.on_refused = on_refused
        self.on_overtaken = on_overtaken
        self.sent: Sent | None = None
        self.sends = 0
        self.newest: int | None = None
        self.settling: asyncio.Task[None] | None = None
        self.not_before = 0.0

    @property
    def subject(self) -> str:
        """Where this publisher's batches go."""
        return subject_of(self.publisher)

    def message_id(self, batch: PendingBatch) -> str:
        """The Nats-Msg-Id of a batch: equal for equal content, different for everything else."""
        key = self.publisher.key
        socket = "" if self.publisher.primary else "/" + "+".join(self.publisher.tiers)
        return (
            f"{key.source}/{escape(key.instance_id)}/{key.dp_rank}{socket}/{batch.generation}"
            f"/{batch.first_seq}-{batch.last_seq}/{batch.part}/{batch.cursor().last_fingerprint:x}"
        )


def subject_of(publisher: Publisher) -> str:
    """The subject of a publisher's canonical events."""
    record = publisher.record
    return events_subject(publisher.key.source, record.model, record.instance_id, record.dp_rank)


async def newest_stored(js: JetStreamContext, subject: str) -> tuple[int, EventBatch | None]:
    """Stream sequence and content of a subject's newest message: (0, None) without one, None for an unreadable one."""
    try:
        message = await js.get_last_msg(EVENTS_STREAM, subject)
    except NotFoundError:
        return 0, None
    try:
        return message.seq or 0, decode_event_batch(message.data or b"")
    except BodyError:
        return message.seq or 0, None


async def last_stored(js: JetStreamContext, subject: str) -> EventBatch | None:
    """The newest batch that the stream keeps for a subject, None when there is none (or none that can be read)."""
    return (await newest_stored(js, subject))[1]
