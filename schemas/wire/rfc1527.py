"""Pool events as maps (Mooncake RFC 1527 and its dialects), one event per object; shared by the pool codecs.

The event's type is examined before anything else, so a clear works although it has no hashes, and an unknown type is
refused instead of being taken for a clear.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec

from schemas.blocks import Tier, tier_of_medium
from schemas.wire.batches import is_map
from schemas.wire.hashes import BadHashError, TextRule, low64
from schemas.wire.limits import MAX_HASHES, MAX_TOKENS, Limits
from schemas.wire.types import Rejected, RejectReason, WireCleared, WireEvent, WireRemoved, WireStored

NIL = msgspec.Raw(b"\xc0")
MAX_HASH_BYTES = 2 * 1024 * 1024

_TextHashes = Annotated[list[int | str | None], msgspec.Meta(max_length=MAX_HASHES)]
_BytesHashes = Annotated[list[int | bytes | None], msgspec.Meta(max_length=MAX_HASHES)]


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
    token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)] | None = None


_decoder = msgspec.msgpack.Decoder(_Event)
_text_hashes = msgspec.msgpack.Decoder(_TextHashes | None)
_bytes_hashes = msgspec.msgpack.Decoder(_BytesHashes | None)
_text_hash = msgspec.msgpack.Decoder(int | str | None)
_bytes_hash = msgspec.msgpack.Decoder(int | bytes | None)

_KINDS = {
    "stored": "stored",
    "blockstored": "stored",
    "removed": "removed",
    "blockremoved": "removed",
    "cleared": "cleared",
    "allblockscleared": "cleared",
}


class _RefusedError(Exception):
    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def read_events(
    items: Iterable[msgspec.Raw], text_rule: TextRule, limits: Limits
) -> tuple[tuple[WireEvent, ...], tuple[Rejected, ...]]:
    """Decode pool events one by one; a bad one is refused alone."""
    events: list[WireEvent] = []
    rejected: list[Rejected] = []
    for position, item in enumerate(items):
        try:
            events.append(_read(item, text_rule, limits))
        except _RefusedError as error:
            rejected.append(Rejected(position, error.reason, error.detail))
    return tuple(events), tuple(rejected)


def _read(item: msgspec.Raw, text_rule: TextRule, limits: Limits) -> WireEvent:
    if not is_map(memoryview(item)[0]):
        raise _RefusedError(RejectReason.WRONG_SHAPE, "a pool event is a map")
    try:
        event = _decoder.decode(item)
    except msgspec.ValidationError as error:
        reason = RejectReason.LIMIT if "length <=" in str(error) else RejectReason.WRONG_TYPE
        raise _RefusedError(reason, str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _RefusedError(RejectReason.NOT_MSGPACK, str(error)) from None
    kind = _kind(event)
    for name in ("model_name", "tenant_id", "backend_id", "lora_name", "additional_salt"):
        if len(getattr(event, name) or "") > limits.text:
            raise _RefusedError(RejectReason.LIMIT, f"{name} is longer than {limits.text} characters")
    tier = _tier(event.medium)
    backend_id, model, tenant = event.backend_id or "", event.model_name or "", event.tenant_id or ""
    if kind == "cleared":
        return WireCleared(tier=tier, backend_id=backend_id, model=model, tenant=tenant)
    hashes = _hashes(event, text_rule)
    if kind == "removed":
        return WireRemoved(hashes=hashes, tier=tier, backend_id=backend_id, model=model, tenant=tenant)
    return _stored(event, hashes, tier, text_rule)


def _stored(event: _Event, hashes: tuple[int, ...], tier: Tier | None, text_rule: TextRule) -> WireStored:
    parent = _parent(event, text_rule)
    if parent is not None and parent in hashes:
        raise _RefusedError(RejectReason.SELF_PARENT, f"block {parent} is its own parent")
    block_size = event.block_size or 0
    if block_size < 0:
        raise _RefusedError(RejectReason.WRONG_TYPE, f"block_size is {block_size}")
    try:
        tokens = array("I", event.token_ids or ())
    except OverflowError:
        raise _RefusedError(RejectReason.BAD_TOKEN, "a token id is negative or above 2^32-1") from None
    if tokens and block_size and len(tokens) != len(hashes) * block_size:
        raise _RefusedError(
            RejectReason.TOKEN_COUNT, f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size} tokens"
        )
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
        raise _RefusedError(RejectReason.UNKNOWN_EVENT, "event_type is missing")
    kind = _KINDS.get(text.strip().lower().replace("_", ""))
    if kind is None:
        raise _RefusedError(RejectReason.UNKNOWN_EVENT, f"event_type {text[:80]!r} is unknown")
    return kind


def _tier(medium: str | None) -> Tier | None:
    if not medium:
        return None
    tier = tier_of_medium(medium)
    if tier is None:
        raise _RefusedError(RejectReason.UNKNOWN_MEDIUM, f"medium {medium[:80]!r} is unknown")
    return tier


def _hashes(event: _Event, text_rule: TextRule) -> tuple[int, ...]:
    """seq_hashes and block_hashes together, each block once; the object key where both are missing or empty."""
    found: dict[int, None] = {}
    try:
        for raw in (event.seq_hashes, event.block_hashes):
            for value in _hash_list(raw):
                found[low64(value, text_rule)] = None
        if not found and event.object_key is not None:
            found[low64(event.object_key, text_rule)] = None
    except BadHashError as error:
        raise _RefusedError(RejectReason.BAD_HASH, str(error)) from None
    if not found:
        raise _RefusedError(RejectReason.NO_HASHES, "neither seq_hashes nor block_hashes nor object_key names a block")
    return tuple(found)


def _hash_list(raw: msgspec.Raw) -> list[int | str | None] | list[int | bytes | None]:
    if len(memoryview(raw)) > MAX_HASH_BYTES:
        raise _RefusedError(RejectReason.LIMIT, f"hashes take {len(memoryview(raw))} bytes")
    try:
        try:
            return _text_hashes.decode(raw) or []
        except msgspec.ValidationError as error:
            if "got `bytes`" not in str(error):
                raise
        return _bytes_hashes.decode(raw) or []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _RefusedError(RejectReason.WRONG_TYPE, f"hashes: {error}") from None


def _parent(event: _Event, text_rule: TextRule) -> int | None:
    for raw in (event.parent_hash, event.parent_block_hash):
        try:
            try:
                value: int | str | bytes | None = _text_hash.decode(raw)
            except msgspec.ValidationError:
                value = _bytes_hash.decode(raw)
            if value is not None and value != "":
                return low64(value, text_rule)
        except (msgspec.DecodeError, UnicodeDecodeError, BadHashError) as error:
            raise _RefusedError(RejectReason.BAD_HASH, f"parent: {error}") from None
    return None
