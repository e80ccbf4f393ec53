"""Block hashes in all their forms, reduced to their low 64 bits.

Integers: two's complement when negative. Bytes: the trailing 8, big-endian (8 to 64 bytes). Text: a rule per publisher,
since "1234567890123456" is a number for one and a hex digest for another:

* memcache sends hex: 16 or 64 digits, all-digit ones too, ``0x`` allowed in front.
* A Mooncake object key is decimal, or hex after ``0x``, or ends in a hex digest after the last ``@``.
* Elsewhere ``0x`` or any letter a-f means hex, only digits (up to 20) mean decimal.

Anything else is refused, blanks included.
"""

import re
from collections.abc import Callable

from schemas.blocks import U64_MASK
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason

MIN_BYTES = 8
MAX_BYTES = 64
MAX_HEX_DIGITS = 2 * MAX_BYTES
MAX_DECIMAL_DIGITS = 20

_HEX = re.compile(r"[0-9a-fA-F]+")
_DECIMAL = re.compile(r"[0-9]+")


class BadHashError(RefusedError):
    """A hash that names no block; the text says why."""

    def __init__(self, detail: str) -> None:
        super().__init__(RejectReason.BAD_HASH, detail)


TextRule = Callable[[str], int]


def low64(value: object, text_rule: TextRule) -> int:
    """The low 64 bits of a hash in any wire form. Raises BadHashError."""
    if type(value) is int:
        if not -(1 << 63) <= value <= U64_MASK:
            raise BadHashError(f"integer {value} does not fit 64 bits")
        return value & U64_MASK
    if type(value) is bytes:
        if not MIN_BYTES <= len(value) <= MAX_BYTES:
            raise BadHashError(f"{len(value)} bytes, expected {MIN_BYTES} to {MAX_BYTES}")
        return int.from_bytes(value[-8:], "big")
    if type(value) is str:
        return text_rule(value)
    raise BadHashError(f"{type(value).__name__} is not a hash")


def _without_prefix(text: str) -> str:
    return text[2:] if text[:2] in ("0x", "0X") else text


def _hex(digits: str, least: int, most: int) -> int:
    if not least <= len(digits) <= most or not _HEX.fullmatch(digits):
        raise BadHashError(f"{digits[:80]!r} is not a hex digest of {least} to {most} digits")
    return int(digits[-16:], 16)


def _decimal(digits: str) -> int:
    if len(digits) > MAX_DECIMAL_DIGITS or int(digits) > U64_MASK:
        raise BadHashError(f"decimal {digits[:80]} does not fit 64 bits")
    return int(digits)


def memcache_text(text: str) -> int:
    """Hex of 16 or 64 digits. Raises BadHashError."""
    digits = _without_prefix(text)
    if len(digits) not in (16, 64):
        raise BadHashError(f"{text[:80]!r} has {len(digits)} digits, memcache sends 16 or 64 hex digits")
    return _hex(digits, 16, 64)


def object_key_text(text: str) -> int:
    """A Mooncake (or YuanRong) object key. Raises BadHashError."""
    if "@" in text:
        return _hex(_without_prefix(text.rpartition("@")[2]), 16, MAX_HEX_DIGITS)
    if text[:2] in ("0x", "0X"):
        return _hex(text[2:], 1, MAX_HEX_DIGITS)
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    raise BadHashError(f"object key {text[:80]!r} is neither decimal, nor 0x hex, nor ends in @ and a hex digest")


def plain_text(text: str) -> int:
    """Text of every other publisher. Raises BadHashError."""
    if text[:2] in ("0x", "0X"):
        return _hex(text[2:], 1, MAX_HEX_DIGITS)
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    return _hex(text, 1, MAX_HEX_DIGITS)
