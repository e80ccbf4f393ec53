"""How far each publisher was published, beyond the stream's retention: the KV bucket ``kv_cursors``.

The newest batch of a publisher in KV_EVENTS says it exactly; the cursor stands in when the stream has forgotten it, so
that a publisher never falls back into a generation that is over.
"""

from typing import Self

import msgspec

from schemas.events import EventBatch


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """last_seq: -1 when a generation began without a message. published_at: seconds since the epoch."""

    generation: int
    last_seq: int
    last_fingerprint: int = 0
    published_at: float = 0.0
    missing: int = 0

    @classmethod
    def of(cls, batch: EventBatch) -> Self:
        """Where a stored batch ends."""
        return cls(
            generation=batch.generation,
            last_seq=batch.last_seq,
            last_fingerprint=batch.last_fingerprint,
            published_at=batch.last_published_at,
            missing=batch.missing,
        )

    def is_behind(self, other: "Cursor") -> bool:
        """Whether the other one is further."""
        return (self.generation, self.last_seq) < (other.generation, other.last_seq)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Cursor)


def dump_cursor(cursor: Cursor) -> bytes:
    """The JSON form of a cursor."""
    return _encoder.encode(cursor)


def load_cursor(body: bytes) -> Cursor | None:
    """Read a cursor; None for what cannot be read."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
