"""YuanRong datasystem workers: the array batch of Mooncake, hashes cut from pool keys by the publisher."""

from schemas.wire.batches import split_array_batch
from schemas.wire.hashes import BadHashError, object_key_text, plain_text
from schemas.wire.limits import DEFAULT_LIMITS, Limits
from schemas.wire.rfc1527 import read_events
from schemas.wire.types import WireBatch


def _text(text: str) -> int:
    """A pool key (with ``@``) or a hash in the plain form. Raises BadHashError."""
    try:
        return object_key_text(text)
    except BadHashError:
        if "@" in text:
            raise
        return plain_text(text)


def decode(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> WireBatch:
    """Read one payload; a bad event is refused alone. Raises WireError when the whole message cannot be used."""
    timestamp, items, dp_rank = split_array_batch(payload, limits)
    events, rejected = read_events(items, _text, limits)
    return WireBatch(timestamp, events, rejected, dp_rank)
