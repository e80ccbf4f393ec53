"""Lists of block hashes on the wire, reduced to low 64 bits at the speed of the C decoder where they are integers."""

from typing import Annotated, Any

import msgspec

from schemas.wire.hashes import TextRule, low64
from schemas.wire.raw import is_binary, is_nil, list_view
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason

# msgspec does not decode text and bytes in one union: publishers send one or the other, each has its own decoder.
_unsigned = msgspec.msgpack.Decoder(tuple[Annotated[int, msgspec.Meta(ge=0)], ...])
_texts = msgspec.msgpack.Decoder(list[int | str | None])
_binaries = msgspec.msgpack.Decoder(list[int | bytes | None])
_text = msgspec.msgpack.Decoder(int | str)
_binary = msgspec.msgpack.Decoder(int | bytes)


def read_hashes(raw: msgspec.Raw, field: str, text_rule: TextRule, limit: int) -> tuple[int, ...]:
    """A list of hashes. Raises RefusedError: WRONG_TYPE, LIMIT or BAD_HASH."""
    elements = list_view(raw, field, limit)
    try:
        return _unsigned.decode(raw)
    except msgspec.ValidationError:
        pass
    first, second = (_binaries, _texts) if len(elements) and is_binary(elements[0]) else (_texts, _binaries)
    try:
        values: list[Any] = first.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # An integer may stand in front of bytes, and nil in front of either.
        try:
            values = second.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RefusedError(RejectReason.WRONG_TYPE, f"{field}: {error}") from None
    return tuple(low64(value, text_rule) for value in values)


def read_hash(raw: msgspec.Raw, field: str, text_rule: TextRule) -> int | None:
    """One hash, None when nil. Raises RefusedError: WRONG_TYPE or BAD_HASH."""
    if is_nil(raw):
        return None
    try:
        return low64((_binary if is_binary(memoryview(raw)[0]) else _text).decode(raw), text_rule)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(RejectReason.WRONG_TYPE, f"{field}: {error}") from None
