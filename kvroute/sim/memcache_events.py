"""The MetaService's batches, byte for byte: maps whose keys always come in one order.

Which keys depends on the kind of event: stored 15, removed 13, cleared 11. Empty texts travel as nil, except
tenant_id and backend_id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute.sim.pool_store import PoolEvent

DEFAULT_TENANT = "default"


@dataclass(frozen=True)
class MetaServiceNames:
    """What the MetaService's configuration puts into every event; hash_as_int False sends hashes as hex text."""

    model_name: str
    block_size: int
    tenant_id: str = DEFAULT_TENANT
    hash_as_int: bool = True

    @property
    def topic(self) -> bytes:
        """The first frame of every message."""
        return f"kv@{self.model_name}".encode() if self.model_name else b"kv"


def key_hashes(key: str, *, as_int: bool) -> list[int | str]:
    """The hash that an object key ends in, empty when there is none."""
    text = key.rpartition("@")[2].removeprefix("0x")
    try:
        value = int(text, 16)
    except ValueError:
        return []
    return [value & 0xFFFF_FFFF_FFFF_FFFF if as_int else text]


def encode_batch(events: Sequence[PoolEvent], names: MetaServiceNames, timestamp_ms: int) -> bytes:
    """A batch as it goes into the third frame."""
    return _encoder.encode({"events": [_event_map(event, names, timestamp_ms) for event in events]})


_encoder = msgspec.msgpack.Encoder()


def _event_map(event: PoolEvent, names: MetaServiceNames, timestamp_ms: int) -> dict[str, Any]:
    header: dict[str, Any] = {
        "event_id": event.event_id,
        "timestamp": timestamp_ms,
        "event_type": event.event_type,
        "model_name": names.model_name or None,
        "block_size": names.block_size or None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": names.tenant_id,
        "medium": event.medium,
        "backend_id": event.backend_id,
        "dp_rank": None,
    }
    if event.key is None:
        return header
    header["seq_hashes"] = key_hashes(event.key, as_int=names.hash_as_int)
    header["base_block_idx"] = None
    if event.event_type == "stored":
        header |= {"parent_hash": None, "token_ids": None}
    return header
