"""Which codec reads a message: an engine's own socket speaks vLLM alone, a pool's form shows in its first byte."""

from collections.abc import Sequence

from schemas.blocks import Tier
from schemas.registry import StoreBackend
from schemas.wire import memcache, mooncake, vllm, yuanrong
from schemas.wire.frames import parse_live
from schemas.wire.types import RejectReason, WireBatch, WireError, WireRemoved, WireStored
from services.ingest.registrations import Publisher


def decode_frames(frames: Sequence[bytes], max_payload_bytes: int) -> tuple[int, bytes]:
    """Sequence number and payload of a ZMQ message. Raises WireError."""
    live = parse_live(frames)
    if len(live.payload) > max_payload_bytes:
        raise WireError(RejectReason.TOO_LARGE, f"payload of {len(live.payload)} bytes, at most {max_payload_bytes}")
    return live.seq, live.payload


def decode_payload(publisher: Publisher, payload: bytes) -> WireBatch:
    """Read a payload in the form that this publisher speaks. Raises WireError."""
    if publisher.dialect == "vllm":
        return vllm.decode(payload)
    if is_map(payload):
        return memcache.decode(payload)
    if publisher.record.store_backend == StoreBackend.YUANRONG:
        return yuanrong.decode(payload)
    return mooncake.decode(payload)


def is_map(payload: bytes) -> bool:
    """Whether a msgpack body is a map, by its first byte."""
    first = payload[0] if payload else 0
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def proves_warm_cache(batch: WireBatch) -> bool:
    """Whether an engine that had just started could not have sent this as its first message.

    A new process has an empty device cache: its first chain has no parent, and it has nothing to remove.
    """
    stored: set[int] = set()
    for event in batch.events:
        if isinstance(event, WireStored) and event.tier in (None, Tier.NPU):
            if event.parent is not None and event.parent not in stored:
                return True
            stored.update(event.hashes)
        elif isinstance(event, WireRemoved) and event.tier in (None, Tier.NPU) and not stored.issuperset(event.hashes):
            return True
    return False
