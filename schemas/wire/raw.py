"""Raw msgpack values: what kind they are and how many elements they claim, before anything is built from them."""

from typing import Final

import msgspec

from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason

NIL: Final = msgspec.Raw(b"\xc0")
TOO_DEEP: Final = "lists in lists deeper than can be read"

_NIL_BYTE = 0xC0


def is_map(first: int) -> bool:
    """Whether a msgpack value with this first byte is a map."""
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def is_array(first: int) -> bool:
    """Whether a msgpack value with this first byte is an array."""
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def is_text(first: int) -> bool:
    """Whether a msgpack value with this first byte is a text."""
    return 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB


def is_binary(first: int) -> bool:
    """Whether a msgpack value with this first byte is a byte string."""
    return 0xC4 <= first <= 0xC6


def is_nil(raw: msgspec.Raw) -> bool:
    """Whether a value is nil, or was not sent (default NIL)."""
    return raw is NIL or memoryview(raw)[0] == _NIL_BYTE


def list_view(raw: msgspec.Raw, field: str, limit: int) -> memoryview:
    """The elements of an array of at most ``limit`` of them, without its header.

    Raises RefusedError: WRONG_TYPE when it is no array, LIMIT when it claims more elements.
    """
    view = memoryview(raw)
    first = view[0]
    if 0x90 <= first <= 0x9F:
        length, start = first & 0x0F, 1
    elif first == 0xDC:
        length, start = int.from_bytes(view[1:3], "big"), 3
    elif first == 0xDD:
        length, start = int.from_bytes(view[1:5], "big"), 5
    else:
        raise RefusedError(RejectReason.WRONG_TYPE, f"{field} is not a list")
    if length > limit:
        raise RefusedError(RejectReason.LIMIT, f"{field} has {length} elements, at most {limit} are read")
    return view[start:]
