"""The fields of vLLM's events, positional or named, as typed structures; lists stay raw until their length is known.

Fields up to ``block_size`` are sent by every release in both forms and are required; later ones came release by release
(README beside this file). Unknown trailing positions and unknown keys are skipped unread.
"""

import msgspec

from schemas.wire.raw import NIL, TOO_DEEP, is_array, is_map
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason


class Stored(msgspec.Struct):
    """BlockStored, in wire order; session_id and what follows it in newer releases is not needed or only handed on."""

    block_hashes: msgspec.Raw
    parent_block_hash: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: int | None
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


class Removed(msgspec.Struct):
    """BlockRemoved, in wire order."""

    block_hashes: msgspec.Raw
    medium: str | None = None
    group_idx: int | None = None
    locality: msgspec.Raw = NIL
    ownership: msgspec.Raw = NIL


class Cleared(msgspec.Struct):
    """AllBlocksCleared; it has no fields."""


class _StoredMap(Stored, tag="BlockStored", tag_field="type"):
    pass


class _RemovedMap(Removed, tag="BlockRemoved", tag_field="type"):
    pass


class _ClearedMap(Cleared, tag="AllBlocksCleared", tag_field="type"):
    pass


class _StoredArray(Stored, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(Removed, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class _MapTag(msgspec.Struct):
    type: str


class _ArrayTag(msgspec.Struct, array_like=True):
    tag: str


_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_map_tag = msgspec.msgpack.Decoder(_MapTag)
_array_tag = msgspec.msgpack.Decoder(_ArrayTag)

_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def read_fields(item: msgspec.Raw) -> Stored | Removed | Cleared:
    """One event, by its first byte an array or a map.

    Raises RefusedError: WRONG_SHAPE, UNKNOWN_EVENT, MISSING_FIELD, WRONG_TYPE, LIMIT or NOT_MSGPACK.
    """
    first = memoryview(item)[0]
    fields: Stored | Removed | Cleared
    try:
        if is_map(first):
            fields = _map.decode(item)
        elif is_array(first):
            fields = _array.decode(item)
        else:
            raise RefusedError(RejectReason.WRONG_SHAPE, f"an event is an array or a map, first byte is 0x{first:02x}")
    except msgspec.ValidationError as error:
        raise _why(item, first, str(error)) from None
    except RecursionError:
        raise RefusedError(RejectReason.LIMIT, TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(RejectReason.NOT_MSGPACK, str(error)) from None
    return fields


def _why(item: msgspec.Raw, first: int, detail: str) -> RefusedError:
    """The reason behind a validation error; found only when there is one, so that good events stay cheap."""
    try:
        tag = _map_tag.decode(item).type if is_map(first) else _array_tag.decode(item).tag
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return RefusedError(RejectReason.UNKNOWN_EVENT, "the event's type is missing or not text")
    if tag not in _TAGS:
        return RefusedError(RejectReason.UNKNOWN_EVENT, f"event type {tag[:80]!r} is unknown")
    if "missing required field" in detail or "at least length" in detail:
        return RefusedError(RejectReason.MISSING_FIELD, f"{tag}: {detail}")
    return RefusedError(RejectReason.WRONG_TYPE, f"{tag}: {detail}")
