"""The events of a simulated engine in vLLM's map form (0.24 and newer), field for field as the real one sends them."""

from typing import Any

import msgspec

GPU = "GPU"
OFFLOAD_CONNECTOR_MEDIUM = "CPU"
POOL_CONNECTOR_MEDIUM = "cpu"
FULL_ATTENTION = "full_attention"


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", omit_defaults=True, kw_only=True):
    """Blocks stored in a medium; required fields travel always, the others only when set."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", omit_defaults=True, kw_only=True):
    """Blocks that left a medium."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    """The device tier was emptied."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared

_encoder = msgspec.msgpack.Encoder()


def encode_batch(timestamp: float, events: list[EngineEvent], dp_rank: int) -> bytes:
    """A batch as it goes into the third frame."""
    return _encoder.encode([timestamp, events, dp_rank])
