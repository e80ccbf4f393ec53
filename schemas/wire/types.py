"""What every codec returns: decoded events beside the ones it had to refuse, never an exception for one bad event."""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec

from schemas.blocks import Tier


class RejectReason(StrEnum):
    """Why one event (or one whole message) was refused; metric labels."""

    FRAME_COUNT = "frame_count"
    SEQUENCE_WIDTH = "sequence_width"
    TOO_LARGE = "too_large"
    NOT_MSGPACK = "not_msgpack"
    WRONG_SHAPE = "wrong_shape"
    WRONG_TYPE = "wrong_type"
    MISSING_FIELD = "missing_field"
    UNKNOWN_EVENT = "unknown_event"
    UNKNOWN_MEDIUM = "unknown_medium"
    BAD_HASH = "bad_hash"
    NO_HASHES = "no_hashes"
    DUPLICATE_HASH = "duplicate_hash"
    SELF_PARENT = "self_parent"
    TOKEN_COUNT = "token_count"
    BAD_TOKEN = "bad_token"
    LIMIT = "limit"
    BLOCK_SIZE_MISMATCH = "block_size_mismatch"
    NON_MAIN_ATTENTION = "non_main_attention"


class Rejected(msgspec.Struct, frozen=True):
    """One refused event: its position in the batch (-1: the whole message), the reason, and what to look at."""

    position: int
    reason: RejectReason
    detail: str = ""


class WireStored(msgspec.Struct, frozen=True):
    """Blocks a publisher says it stored.

    hashes: low 64 bits, chain order. token_ids: u32 values, empty when not sent. block_size: 0 when not sent.
    tier None: no medium was named. block_keys: per block, extra keys in canonical text (images and the like).
    lora_name / lora_id / cache_salt: namespace of the chain, as far as the event tells.
    """

    hashes: tuple[int, ...]
    parent: int | None = None
    token_ids: array[int] = msgspec.field(default_factory=lambda: array("I"))
    block_size: int = 0
    tier: Tier | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    cache_salt: str | None = None
    block_keys: tuple[tuple[str, ...], ...] = ()
    group_idx: int | None = None
    spec_kind: str | None = None
    sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    backend_id: str = ""
    model: str = ""
    tenant: str = ""


class WireRemoved(msgspec.Struct, frozen=True):
    """Blocks a publisher says it removed; tier None: no medium was named."""

    hashes: tuple[int, ...]
    tier: Tier | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    backend_id: str = ""
    model: str = ""
    tenant: str = ""


class WireCleared(msgspec.Struct, frozen=True):
    """Everything is gone, in the named tier or (None) in all tiers of this kind of publisher."""

    tier: Tier | None = None
    backend_id: str = ""
    model: str = ""
    tenant: str = ""


WireEvent = WireStored | WireRemoved | WireCleared


class WireBatch(msgspec.Struct, frozen=True):
    """One decoded payload. timestamp: seconds since the epoch, 0.0 unknown. dp_rank None: the batch does not say.

    other_groups: cache groups whose stores were refused because they are not main attention.
    """

    timestamp: float
    events: tuple[WireEvent, ...]
    rejected: tuple[Rejected, ...] = ()
    dp_rank: int | None = None
    other_groups: frozenset[int] = frozenset()


class WireError(ValueError):
    """A whole message that cannot be used. ``reason`` is a RejectReason."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
