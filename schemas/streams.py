"""State of publishers' streams: what the KV bucket ``kv_streams`` holds, one JSON record per publisher.

Written by ingest when a state changes and every few seconds otherwise; the bucket forgets a record that is not repeated
(``nats.stream_state_ttl``). A publisher without a record is stale: nobody listens to it.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from schemas.events import BodyError, SourceKind

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class StreamState(StrEnum):
    """The word that every answer about a publisher carries.

    live: everything that was published in this generation is applied. recovering: a repair runs, newer messages wait.
    gapped: something is missing and could not be had again. stale: the connection is lost. unknown: nothing was heard
    yet in this generation, or not since the connection came back.
    """

    UNKNOWN = "unknown"
    LIVE = "live"
    RECOVERING = "recovering"
    GAPPED = "gapped"
    STALE = "stale"


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One publisher's stream (source, instance_id, dp_rank); the worst state of its sockets.

    state_since: when it took its state. reason: why it is not live, in a few words; empty when it is. generation:
    milliseconds since the epoch. first_seq / last_seq: the publisher's own numbers, of this generation, that went on to
    the index; None before the first. coverage: part of the numbers published in this generation that went on, 0 to 1.
    missing: numbers of this generation that never came. gaps, restarts, repaired (messages that a replay brought):
    since ingest began to listen. last_message_at: None before the first message of any kind. Counts of
    messages: received = published + rejected + dropped + pending. writer: which ingest says so. Times in seconds since
    the epoch, of the writer's clock.
    """

    source: SourceKind
    instance_id: str
    dp_rank: int
    model: str
    tenant: str
    state: StreamState
    generation: int
    state_since: float
    written_at: float
    writer: str
    coverage: Fraction
    reason: str = ""
    connected: bool = False
    first_seq: int | None = None
    last_seq: int | None = None
    missing: int = 0
    gaps: int = 0
    repaired: int = 0
    restarts: int = 0
    last_message_at: float | None = None
    received: int = 0
    published: int = 0
    rejected: int = 0
    dropped: int = 0
    pending: int = 0

    def age(self, now: float) -> float | None:
        """Seconds since the last message, None before the first. An old stream is idle, not dead."""
        return None if self.last_message_at is None else max(0.0, now - self.last_message_at)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StreamRecord)


def dump_stream_record(record: StreamRecord) -> bytes:
    """The JSON form of a record."""
    return _encoder.encode(record)


def load_stream_record(body: bytes) -> StreamRecord:
    """Read a record. Raises BodyError naming the field."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BodyError(f"stream record: {error}") from error
