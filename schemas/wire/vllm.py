"""vLLM engine batches (0.9 to 0.33): events as positional arrays or as maps, mixed in one batch."""

import msgspec

from schemas.blocks import Tier, tier_of_medium
from schemas.wire.batches import split_array_batch
from schemas.wire.extra_keys import read_extra_keys
from schemas.wire.hash_lists import read_hash, read_hashes
from schemas.wire.hashes import plain_text
from schemas.wire.limits import DEFAULT_LIMITS, Limits
from schemas.wire.raw import NIL
from schemas.wire.refusal import RefusedError
from schemas.wire.tokens import check_token_count, read_tokens
from schemas.wire.types import (
    Rejected,
    RejectReason,
    WireBatch,
    WireCleared,
    WireEvent,
    WireRemoved,
    WireStored,
)
from schemas.wire.vllm_fields import Removed, Stored, read_fields
from schemas.wire.vllm_groups import MAX_GROUPS, GroupFilter

__all__ = ["MAX_BLOCK_TOKENS", "NON_MAIN_KINDS", "GroupFilter", "decode", "is_main_attention"]

MAX_BLOCK_TOKENS = 65_536
NON_MAIN_KINDS = frozenset(
    ("slidingwindow", "slidingwindowmla", "mamba", "chunkedlocalattention", "encoderonlyattention", "crossattention")
)
MAX_NOTE_BYTES = 8 * 1024

_note = msgspec.msgpack.Decoder(int | str | None)


def decode(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> WireBatch:
    """Read one payload; a bad event is refused alone. Raises WireError when the whole message cannot be used."""
    timestamp, items, dp_rank = split_array_batch(payload, limits)
    events: list[WireEvent] = []
    rejected: list[Rejected] = []
    other_groups: set[int] = set()
    for position, item in enumerate(items):
        try:
            fields = read_fields(item)
            if isinstance(fields, Stored):
                group_idx = _group(fields.group_idx)
                if not is_main_attention(fields.kv_cache_spec_kind):
                    detail = f"kv_cache_spec_kind {str(fields.kv_cache_spec_kind)[:80]!r}"
                    rejected.append(Rejected(position, RejectReason.NON_MAIN_ATTENTION, detail))
                    if group_idx is not None:
                        other_groups.add(group_idx)
                    continue
                events.append(_stored(fields, limits))
            elif isinstance(fields, Removed):
                events.append(_removed(fields, limits))
            else:
                events.append(WireCleared(tier=Tier.NPU))
        except RefusedError as error:
            rejected.append(Rejected(position, error.reason, error.detail))
    return WireBatch(timestamp, tuple(events), tuple(rejected), dp_rank, frozenset(other_groups))


def is_main_attention(kind: str | None) -> bool:
    """Whether blocks of this attention kind form a prefix; absent and unknown kinds count as main."""
    return kind is None or kind.lower().replace("_", "") not in NON_MAIN_KINDS


def _stored(fields: Stored, limits: Limits) -> WireStored:
    hashes = _hashes(fields.block_hashes, limits)
    parent = read_hash(fields.parent_block_hash, "parent_block_hash", plain_text)
    if len(set(hashes)) != len(hashes):
        raise RefusedError(RejectReason.DUPLICATE_HASH, "one hash names two blocks of the chain")
    if parent is not None and parent in hashes:
        raise RefusedError(RejectReason.SELF_PARENT, f"block {parent} is its own parent")
    block_size = fields.block_size or 0
    if not 0 <= block_size <= MAX_BLOCK_TOKENS:
        raise RefusedError(RejectReason.WRONG_TYPE, f"block_size {block_size} is not within 0 and {MAX_BLOCK_TOKENS}")
    tokens = read_tokens(fields.token_ids, limits.tokens)
    check_token_count(len(tokens), len(hashes), block_size)
    for name, text in (("lora_name", fields.lora_name), ("kv_cache_spec_kind", fields.kv_cache_spec_kind)):
        if text is not None and len(text) > limits.text:
            raise RefusedError(RejectReason.LIMIT, f"{name} has {len(text)} characters, at most {limits.text} are read")
    namespace = read_extra_keys(fields.extra_keys, len(hashes), fields.lora_name or None, parent is None, limits)
    return WireStored(
        hashes=hashes,
        parent=parent,
        token_ids=tokens,
        block_size=block_size,
        tier=_tier(fields.medium),
        lora_name=namespace.lora_name,
        lora_id=fields.lora_id,
        cache_salt=namespace.cache_salt,
        block_keys=namespace.block_keys,
        group_idx=fields.group_idx,
        spec_kind=fields.kv_cache_spec_kind,
        sliding_window=_integer(fields.kv_cache_spec_sliding_window),
        locality=_text(fields.locality),
        ownership=_text(fields.ownership),
        session_id=_text(fields.session_id),
    )


def _removed(fields: Removed, limits: Limits) -> WireRemoved:
    return WireRemoved(
        hashes=_hashes(fields.block_hashes, limits),
        tier=_tier(fields.medium),
        group_idx=_group(fields.group_idx),
        locality=_text(fields.locality),
        ownership=_text(fields.ownership),
    )


def _hashes(raw: msgspec.Raw, limits: Limits) -> tuple[int, ...]:
    hashes = read_hashes(raw, "block_hashes", plain_text, limits.hashes)
    if not hashes:
        raise RefusedError(RejectReason.NO_HASHES, "block_hashes is empty")
    return hashes


def _group(group_idx: int | None) -> int | None:
    if group_idx is not None and not 0 <= group_idx < MAX_GROUPS:
        raise RefusedError(RejectReason.LIMIT, f"group_idx {group_idx} is not within 0 and {MAX_GROUPS - 1}")
    return group_idx


def _tier(medium: str | None) -> Tier:
    """A medium that is not named is the engine's own memory, for stores and removals alike."""
    if medium is None:
        return Tier.NPU
    tier = tier_of_medium(medium)
    if tier is None:
        raise RefusedError(RejectReason.UNKNOWN_MEDIUM, f"medium {medium[:80]!r} is unknown")
    return tier


def _handed_on(raw: msgspec.Raw) -> int | str | None:
    """A field that is only handed on: whatever cannot be read is absent."""
    if raw is NIL or len(memoryview(raw)) > MAX_NOTE_BYTES:
        return None
    try:
        value: int | str | None = _note.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value


def _text(raw: msgspec.Raw) -> str | None:
    value = _handed_on(raw)
    return value if isinstance(value, str) else None


def _integer(raw: msgspec.Raw) -> int | None:
    value = _handed_on(raw)
    return value if isinstance(value, int) else None
