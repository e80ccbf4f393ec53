"""Mooncake master batches: ``[timestamp_ms, [event maps], dp_rank]`` with RFC 1527 maps and legacy aliases."""

from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.wire.batches import split_array_batch
from schemas.wire.hashes import object_key_text
from schemas.wire.limits import DEFAULT_LIMITS, Limits
from schemas.wire.rfc1527 import read_events
from schemas.wire.types import WireBatch

_encoder = msgspec.msgpack.Encoder()


def decode(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> WireBatch:
    """Read one payload; a bad event is refused alone. Raises WireError when the whole message cannot be used."""
    timestamp, items, dp_rank = split_array_batch(payload, limits)
    events, rejected = read_events(items, object_key_text, limits)
    return WireBatch(timestamp, events, rejected, dp_rank)


def encode_batch(timestamp_ms: int, events: Sequence[dict[str, Any]], dp_rank: int | None = 0) -> bytes:
    """Write a batch as the master does; every event is a map of RFC 1527 fields."""
    return _encoder.encode([timestamp_ms, list(events), dp_rank])
