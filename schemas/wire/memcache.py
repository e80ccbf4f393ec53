"""memcache MetaService batches: a map with one key ``events``, one event per object key.

stored has 15 keys, removed 13, cleared 11, always in the order of the README; readers tolerate missing ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.wire.batches import check_payload, event_list
from schemas.wire.hashes import memcache_text
from schemas.wire.limits import DEFAULT_LIMITS, Limits
from schemas.wire.raw import TOO_DEEP, is_map
from schemas.wire.rfc1527 import read_events
from schemas.wire.types import RejectReason, WireBatch, WireError


class _Batch(msgspec.Struct):
    events: msgspec.Raw


class _Timestamp(msgspec.Struct):
    timestamp: int | float | None = None


_batch = msgspec.msgpack.Decoder(_Batch)
_timestamp = msgspec.msgpack.Decoder(_Timestamp)
_encoder = msgspec.msgpack.Encoder()


def is_batch(payload: bytes) -> bool:
    """Dispatch of a pool's payload by its first byte: a map is memcache's, an array Mooncake's or YuanRong's."""
    return bool(payload) and is_map(payload[0])


def decode(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> WireBatch:
    """Read one payload; a bad event is refused alone. Raises WireError when the whole message cannot be used."""
    check_payload(payload, limits)
    if not is_map(payload[0]):
        raise WireError(RejectReason.WRONG_SHAPE, f"a memcache batch is a map, first byte is 0x{payload[0]:02x}")
    try:
        items = event_list(_batch.decode(payload).events, limits)
    except msgspec.ValidationError as error:
        raise WireError(RejectReason.WRONG_SHAPE, f"not {{events: [...]}}: {error}") from None
    except RecursionError:
        raise WireError(RejectReason.LIMIT, TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(RejectReason.NOT_MSGPACK, str(error)) from None
    events, rejected = read_events(items, memcache_text, limits)
    return WireBatch(_newest(items), events, rejected)


def _newest(items: Sequence[msgspec.Raw]) -> float:
    """When the last event happened, in seconds; memcache stamps events, not batches, in milliseconds."""
    if not items:
        return 0.0
    try:
        stamp = _timestamp.decode(items[-1]).timestamp
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0.0
    return float(stamp) / 1000.0 if stamp and 0 < stamp < 1e15 else 0.0


@dataclass(frozen=True, slots=True)
class MetaEvent:
    """What the MetaService knows of one event. seq_hashes: at most one hash, int or hex text."""

    event_id: int
    timestamp: int
    event_type: str
    backend_id: str
    medium: str | None
    seq_hashes: tuple[int | str, ...] = ()
    model_name: str | None = None
    block_size: int | None = None
    tenant_id: str = "default"


def encode_batch(events: Sequence[MetaEvent]) -> bytes:
    """Write a batch byte for byte as the MetaService does: fixed key order, empty texts as nil."""
    return _encoder.encode({"events": [_event_map(event) for event in events]})


def _event_map(event: MetaEvent) -> dict[str, Any]:
    values: dict[str, Any] = {
        "event_id": event.event_id,
        "timestamp": event.timestamp,
        "event_type": event.event_type,
        "model_name": event.model_name or None,
        "block_size": event.block_size or None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": event.tenant_id,
        "medium": event.medium or None,
        "backend_id": event.backend_id,
        "dp_rank": None,
    }
    if event.event_type == "cleared":
        return values
    values["seq_hashes"] = list(event.seq_hashes)
    values["base_block_idx"] = None
    if event.event_type == "stored":
        values |= {"parent_hash": None, "token_ids": None}
    return values
