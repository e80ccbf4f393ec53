"""vLLM engine batches (0.9 to 0.33): events as positional arrays or as maps, mixed in one batch.

Positions and fields are in the README beside this file. Unknown trailing positions and unknown keys are skipped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from schemas.blocks import Tier, tier_of_medium
from schemas.wire.batches import is_array, is_map, split_array_batch
from schemas.wire.extra_keys import read_extra_keys
from schemas.wire.hashes import BadHashError, low64, plain_text
from schemas.wire.limits import DEFAULT_LIMITS, MAX_HASHES, MAX_KEYS, MAX_TOKENS, Limits
from schemas.wire.types import (
    Rejected,
    RejectReason,
    WireBatch,
    WireCleared,
    WireEvent,
    WireRemoved,
    WireStored,
)

MAX_BLOCK_TOKENS = 65_536
NON_MAIN_KINDS = frozenset(
    ("slidingwindow", "slidingwindowmla", "mamba", "chunkedlocalattention", "encoderonlyattention", "crossattention")
)

MAX_EXTRA_KEYS_BYTES = 1024 * 1024
MAX_NOTE_BYTES = 8 * 1024

NIL = msgspec.Raw(b"\xc0")

Hash = int | str | bytes | None
Tokens = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]
# msgspec does not decode text and bytes in one union: publishers send one or the other, each has its own decoder.
NumberOrText = int | str | None
NumberOrBytes = int | bytes | None
TextHashes = Annotated[list[NumberOrText], msgspec.Meta(max_length=MAX_HASHES)]
BytesHashes = Annotated[list[NumberOrBytes], msgspec.Meta(max_length=MAX_HASHES)]


class _Stored(msgspec.Struct):
    block_hashes: TextHashes
    parent_block_hash: NumberOrText = None
    token_ids: Tokens | None = None
    block_size: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: msgspec.Raw = NIL
    locality: msgspec.Raw = NIL
    ownership: msgspec.Raw = NIL
    session_id: msgspec.Raw = NIL


class _StoredBytes(msgspec.Struct):
    block_hashes: BytesHashes
    parent_block_hash: NumberOrBytes = None
    token_ids: Tokens | None = None
    block_size: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = NIL
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: msgspec.Raw = NIL
    locality: msgspec.Raw = NIL
    ownership: msgspec.Raw = NIL
    session_id: msgspec.Raw = NIL


class _Removed(msgspec.Struct):
    block_hashes: TextHashes
    medium: str | None = None
    group_idx: int | None = None
    locality: msgspec.Raw = NIL
    ownership: msgspec.Raw = NIL


class _RemovedBytes(msgspec.Struct):
    block_hashes: BytesHashes
    medium: str | None = None
    group_idx: int | None = None
    locality: msgspec.Raw = NIL
    ownership: msgspec.Raw = NIL


class _StoredMap(_Stored, tag="BlockStored", tag_field="type"):
    pass


class _StoredBytesMap(_StoredBytes, tag="BlockStored", tag_field="type"):
    pass


class _RemovedMap(_Removed, tag="BlockRemoved", tag_field="type"):
    pass


class _RemovedBytesMap(_RemovedBytes, tag="BlockRemoved", tag_field="type"):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _StoredBytesArray(_StoredBytes, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _RemovedBytesArray(_RemovedBytes, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _MapTag(msgspec.Struct):
    type: str


class _ArrayTag(msgspec.Struct, array_like=True):
    tag: str


_map_decoders = (
    msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap),
    msgspec.msgpack.Decoder(_StoredBytesMap | _RemovedBytesMap | _ClearedMap),
)
_array_decoders = (
    msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray),
    msgspec.msgpack.Decoder(_StoredBytesArray | _RemovedBytesArray | _ClearedArray),
)
_extra_keys_decoder = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[list[Any], msgspec.Meta(max_length=MAX_KEYS)] | None], msgspec.Meta(max_length=MAX_HASHES)]
)
_any_decoder = msgspec.msgpack.Decoder()
_map_tag_decoder = msgspec.msgpack.Decoder(_MapTag)
_array_tag_decoder = msgspec.msgpack.Decoder(_ArrayTag)
_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class _RefusedError(Exception):
    def __init__(self, reason: RejectReason, detail: str, group_idx: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.group_idx = group_idx


def decode(payload: bytes, limits: Limits = DEFAULT_LIMITS) -> WireBatch:
    """Read one payload; a bad event is refused alone. Raises WireError when the whole message cannot be used."""
    timestamp, items, dp_rank = split_array_batch(payload, limits)
    events: list[WireEvent] = []
    rejected: list[Rejected] = []
    other_groups: set[int] = set()
    for position, item in enumerate(items):
        try:
            events.append(_event(item, limits))
        except _RefusedError as error:
            rejected.append(Rejected(position, error.reason, error.detail))
            if error.group_idx is not None:
                other_groups.add(error.group_idx)
    return WireBatch(timestamp, tuple(events), tuple(rejected), dp_rank, frozenset(other_groups))


def is_main_attention(kind: str | None) -> bool:
    """Whether blocks of this attention kind form a prefix; absent and unknown kinds count as main."""
    return kind is None or kind.lower().replace("_", "") not in NON_MAIN_KINDS


def _event(item: msgspec.Raw, limits: Limits) -> WireEvent:
    first = memoryview(item)[0]
    if is_map(first):
        decoders: tuple[Any, Any] = _map_decoders
    elif is_array(first):
        decoders = _array_decoders
    else:
        raise _RefusedError(RejectReason.WRONG_SHAPE, f"an event is an array or a map, first byte is 0x{first:02x}")
    event = _decode(item, first, decoders)
    if isinstance(event, _Stored | _StoredBytes):
        return _stored(event, limits)
    if isinstance(event, _Removed | _RemovedBytes):
        return WireRemoved(
            hashes=_hashes(event.block_hashes),
            tier=_tier(event.medium),
            group_idx=event.group_idx,
            locality=_text(event.locality),
            ownership=_text(event.ownership),
        )
    return WireCleared(tier=Tier.NPU)


def _decode(item: msgspec.Raw, first: int, decoders: tuple[Any, Any]) -> Any:
    try:
        try:
            return decoders[0].decode(item)
        except msgspec.ValidationError as error:
            if "got `bytes`" not in str(error):
                raise
        return decoders[1].decode(item)
    except msgspec.ValidationError as error:
        raise _why(item, first, str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _RefusedError(RejectReason.NOT_MSGPACK, str(error)) from None


def _why(item: msgspec.Raw, first: int, detail: str) -> _RefusedError:
    """The reason behind a validation error; found only when there is one, so that good events stay cheap."""
    if "length <=" in detail:
        return _RefusedError(RejectReason.LIMIT, detail)
    try:
        tag = _map_tag_decoder.decode(item).type if is_map(first) else _array_tag_decoder.decode(item).tag
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _RefusedError(RejectReason.UNKNOWN_EVENT, "the event's type is missing or not text")
    if tag not in _TAGS:
        return _RefusedError(RejectReason.UNKNOWN_EVENT, f"event type {str(tag)[:80]!r} is unknown")
    if "missing required field" in detail or "at least length" in detail:
        return _RefusedError(RejectReason.MISSING_FIELD, f"{tag}: {detail}")
    return _RefusedError(RejectReason.WRONG_TYPE, f"{tag}: {detail}")


def _stored(event: _Stored | _StoredBytes, limits: Limits) -> WireStored:
    if not is_main_attention(event.kv_cache_spec_kind):
        kind = f"kv_cache_spec_kind {event.kv_cache_spec_kind!r}"
        raise _RefusedError(RejectReason.NON_MAIN_ATTENTION, kind, event.group_idx)
    hashes = _hashes(event.block_hashes)
    parent = None if event.parent_block_hash is None else _hash(event.parent_block_hash)
    _check_chain(hashes, parent)
    block_size = event.block_size or 0
    if not 0 <= block_size <= MAX_BLOCK_TOKENS:
        raise _RefusedError(RejectReason.WRONG_TYPE, f"block_size is {block_size}")
    tokens = _tokens(event.token_ids)
    if tokens and len(tokens) != len(hashes) * block_size:
        raise _RefusedError(
            RejectReason.TOKEN_COUNT, f"{len(tokens)} tokens for {len(hashes)} blocks of {block_size} tokens"
        )
    if event.lora_name is not None and len(event.lora_name) > limits.text:
        raise _RefusedError(RejectReason.LIMIT, f"lora_name has {len(event.lora_name)} characters")
    namespace = read_extra_keys(_extra_keys(event.extra_keys), event.lora_name or None, parent is None)
    return WireStored(
        hashes=hashes,
        parent=parent,
        token_ids=tokens,
        block_size=block_size,
        tier=_tier(event.medium),
        lora_name=namespace.lora_name,
        lora_id=event.lora_id,
        cache_salt=namespace.cache_salt,
        block_keys=namespace.block_keys,
        group_idx=event.group_idx,
        spec_kind=event.kv_cache_spec_kind,
        sliding_window=_integer(event.kv_cache_spec_sliding_window),
        locality=_text(event.locality),
        ownership=_text(event.ownership),
        session_id=_text(event.session_id),
    )


def _check_chain(hashes: tuple[int, ...], parent: int | None) -> None:
    if len(set(hashes)) != len(hashes):
        raise _RefusedError(RejectReason.DUPLICATE_HASH, "one hash names two blocks of the chain")
    if parent is not None and parent in hashes:
        raise _RefusedError(RejectReason.SELF_PARENT, f"block {parent} is its own parent")


def _hash(value: Hash) -> int:
    try:
        return low64(value, plain_text)
    except BadHashError as error:
        raise _RefusedError(RejectReason.BAD_HASH, str(error)) from None


def _hashes(values: Sequence[Hash]) -> tuple[int, ...]:
    if not values:
        raise _RefusedError(RejectReason.NO_HASHES, "block_hashes is empty")
    try:
        # The usual case: unsigned integers, checked and converted at C speed.
        return tuple(array("Q", values))  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return tuple(_hash(value) for value in values)


def _tokens(values: list[int] | None) -> array[int]:
    if not values:
        return array("I")
    try:
        return array("I", values)
    except OverflowError:
        raise _RefusedError(RejectReason.BAD_TOKEN, "a token id is negative or above 2^32-1") from None


def _tier(medium: str | None) -> Tier:
    if medium is None:
        return Tier.NPU
    tier = tier_of_medium(medium)
    if tier is None:
        raise _RefusedError(RejectReason.UNKNOWN_MEDIUM, f"medium {medium[:80]!r} is unknown")
    return tier


def _extra_keys(raw: msgspec.Raw) -> list[list[Any] | None] | None:
    if len(memoryview(raw)) > MAX_EXTRA_KEYS_BYTES:
        raise _RefusedError(RejectReason.LIMIT, f"extra_keys takes {len(memoryview(raw))} bytes")
    if memoryview(raw)[0] == 0xC0:
        return None
    try:
        return _extra_keys_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _RefusedError(RejectReason.WRONG_TYPE, f"extra_keys: {error}") from None


def _note(raw: msgspec.Raw) -> object:
    """A field that is only handed on: whatever cannot be read is absent."""
    if len(memoryview(raw)) > MAX_NOTE_BYTES:
        return None
    try:
        return _any_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _text(raw: msgspec.Raw) -> str | None:
    value = _note(raw)
    return value if isinstance(value, str) else None


def _integer(raw: msgspec.Raw) -> int | None:
    value = _note(raw)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class GroupFilter:
    """Drops removals of cache groups that are not main attention; a removal names its group but not its kind.

    One per publisher. HY-02: a sliding-window group's removal must leave the full-attention group's block alone.
    """

    def __init__(self) -> None:
        self._other_groups: set[int] = set()

    def apply(self, batch: WireBatch) -> WireBatch:
        """The batch without removals of groups known to be other than main attention."""
        self._other_groups |= batch.other_groups
        if not self._other_groups:
            return batch
        kept: list[WireEvent] = []
        rejected = list(batch.rejected)
        for position, event in enumerate(batch.events):
            if isinstance(event, WireStored) and event.group_idx is not None:
                self._other_groups.discard(event.group_idx)
            if isinstance(event, WireRemoved) and event.group_idx in self._other_groups:
                detail = f"removal in cache group {event.group_idx}"
                rejected.append(Rejected(position, RejectReason.NON_MAIN_ATTENTION, detail))
            else:
                kept.append(event)
        return WireBatch(batch.timestamp, tuple(kept), tuple(rejected), batch.dp_rank)
