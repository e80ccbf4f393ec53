"""Pool events as maps (Mooncake RFC 1527 and its dialects), one event per object; shared by the pool codecs.

The event's type is examined before anything else, so a clear works although it has no hashes, and an unknown type is
refused instead of being taken for a clear.
"""

from collections.abc import Iterable

import msgspec

from schemas.blocks import Tier, tier_of_medium
from schemas.wire.hash_lists import read_hash, read_hashes
from schemas.wire.hashes import TextRule, low64
from schemas.wire.limits import Limits
from schemas.wire.raw import NIL, TOO_DEEP, is_map, is_nil
from schemas.wire.refusal import RefusedError
from schemas.wire.tokens import check_token_count, read_tokens
from schemas.wire.types import Rejected, RejectReason, WireCleared, WireEvent, WireRemoved, WireStored

MAX_BLOCK_TOKENS = 2**32 - 1


class _Event(msgspec.Struct):
    event_type: str | None = None
    type: str | None = None
    model_name: str | None = None
    tenant_id: str | None = None
    medium: str | None = None
    backend_id: str | None = None
    additional_salt: str | None = None
    lora_name: str | None = None
    block_size: int | None = None
    object_key: str | int | None = None
    seq_hashes: msgspec.Raw = NIL
    block_hashes: msgspec.Raw = NIL
    parent_hash: msgspec.Raw = NIL
    parent_block_hash: msgspec.Raw = NIL
    token_ids: msgspec.Raw = NIL


_decoder = msgspec.msgpack.Decoder(_Event)

_STORED, _REMOVED, _CLEARED = "stored", "removed", "cleared"
_KINDS = {
    "stored": _STORED,
    "BlockStored": _STORED,
    "removed": _REMOVED,
    "BlockRemoved": _REMOVED,
    "cleared": _CLEARED,
    "AllBlocksCleared": _CLEARED,
}
_TEXT_FIELDS = ("model_name", "tenant_id", "backend_id", "lora_name", "additional_salt", "object_key")


def read_events(
    items: Iterable[msgspec.Raw], text_rule: TextRule, limits: Limits
) -> tuple[tuple[WireEvent, ...], tuple[Rejected, ...]]:
    """Decode pool events one by one; a bad one is refused alone."""
    events: list[WireEvent] = []
    rejected: list[Rejected] = []
    for position, item in enumerate(items):
        try:
            events.append(_read(item, text_rule, limits))
        except RefusedError as error:
            rejected.append(Rejected(position, error.reason, error.detail))
    return tuple(events), tuple(rejected)


def _read(item: msgspec.Raw, text_rule: TextRule, limits: Limits) -> WireEvent:
    view = memoryview(item)
    if not is_map(view[0]):
        raise RefusedError(RejectReason.WRONG_SHAPE, f"a pool event is a map, first byte is 0x{view[0]:02x}")
    try:
        event = _decoder.decode(item)
    except msgspec.ValidationError as error:
        raise RefusedError(RejectReason.WRONG_TYPE, str(error)) from None
    except RecursionError:
        raise RefusedError(RejectReason.LIMIT, TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(RejectReason.NOT_MSGPACK, str(error)) from None
    kind = _kind(event)
    if len(view) > limits.text:
        _check_texts(event, limits)
    tier = _tier(event.medium)
    backend_id, model, tenant = event.backend_id or "", event.model_name or "", event.tenant_id or ""
    if kind == _CLEARED:
        return WireCleared(tier=tier, backend_id=backend_id, model=model, tenant=tenant)
    hashes = _hashes(event, text_rule, limits)
    if kind == _REMOVED:
        return WireRemoved(hashes=hashes, tier=tier, backend_id=backend_id, model=model, tenant=tenant)
    return _stored(event, hashes, tier, text_rule, limits)


def _stored(
    event: _Event, hashes: tuple[int, ...], tier: Tier | None, text_rule: TextRule, limits: Limits
) -> WireStored:
    parent = read_hash(event.parent_hash, "parent_hash", text_rule)
    if parent is None:
        parent = read_hash(event.parent_block_hash, "parent_block_hash", text_rule)
    if parent is not None and parent in hashes:
        raise RefusedError(RejectReason.SELF_PARENT, f"block {parent} is its own parent")
    block_size = event.block_size or 0
    if not 0 <= block_size <= MAX_BLOCK_TOKENS:
        raise RefusedError(RejectReason.WRONG_TYPE, f"block_size {block_size} is not within 0 and {MAX_BLOCK_TOKENS}")
    tokens = read_tokens(event.token_ids, limits.tokens)
    if block_size:
        check_token_count(len(tokens), len(hashes), block_size)
    return WireStored(
        hashes=hashes,
        parent=parent,
        token_ids=tokens,
        block_size=block_size,
        tier=tier,
        lora_name=event.lora_name or None,
        cache_salt=event.additional_salt or None,
        backend_id=event.backend_id or "",
        model=event.model_name or "",
        tenant=event.tenant_id or "",
    )


def _kind(event: _Event) -> str:
    text = event.event_type or event.type
    if not text:
        raise RefusedError(RejectReason.UNKNOWN_EVENT, "event_type is missing")
    kind = _KINDS.get(text)
    if kind is None:
        raise RefusedError(RejectReason.UNKNOWN_EVENT, f"event_type {text[:80]!r} is unknown")
    return kind


def _check_texts(event: _Event, limits: Limits) -> None:
    for name in _TEXT_FIELDS:
        text = getattr(event, name)
        if isinstance(text, str) and len(text) > limits.text:
            raise RefusedError(RejectReason.LIMIT, f"{name} has {len(text)} characters, at most {limits.text} are read")


def _tier(medium: str | None) -> Tier | None:
    if not medium:
        return None
    tier = tier_of_medium(medium)
    if tier is None:
        raise RefusedError(RejectReason.UNKNOWN_MEDIUM, f"medium {medium[:80]!r} is unknown")
    return tier


def _hashes(event: _Event, text_rule: TextRule, limits: Limits) -> tuple[int, ...]:
    """seq_hashes and block_hashes together, each block once; the object key where both are missing or empty."""
    found: tuple[int, ...] = ()
    if not is_nil(event.seq_hashes):
        found = read_hashes(event.seq_hashes, "seq_hashes", text_rule, limits.hashes)
    if not is_nil(event.block_hashes):
        found += read_hashes(event.block_hashes, "block_hashes", text_rule, limits.hashes)
    if not found and event.object_key is not None:
        return (low64(event.object_key, text_rule),)
    if not found:
        raise RefusedError(RejectReason.NO_HASHES, "neither seq_hashes nor block_hashes nor object_key names a block")
    return tuple(dict.fromkeys(found)) if len(found) > 1 else found
