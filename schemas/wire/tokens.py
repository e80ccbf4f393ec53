"""Token ids on the wire: a list of u32 values, read without a loop in Python."""

from __future__ import annotations

from array import array

import msgspec

from schemas.native import HASHING_IS_COMPILED, hashing
from schemas.wire.raw import is_nil, list_view
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason

_tokens = msgspec.msgpack.Decoder(list[int])


def read_tokens(raw: msgspec.Raw, limit: int) -> array[int]:
    """Token ids, empty when nil. Raises RefusedError: WRONG_TYPE, LIMIT, or BAD_TOKEN outside 0 to 2^32-1."""
    if is_nil(raw):
        return array("I")
    elements = list_view(raw, "token_ids", limit)
    packed = hashing.packed_u32(elements) if HASHING_IS_COMPILED else None
    if packed is not None:
        tokens = array("I")
        tokens.frombytes(packed)
        return tokens
    # What is no plain list of u32 values is told apart where errors have names.
    try:
        return array("I", _tokens.decode(raw))
    except OverflowError:
        raise RefusedError(RejectReason.BAD_TOKEN, "a token id is negative or above 2^32-1") from None
    except msgspec.DecodeError as error:
        raise RefusedError(RejectReason.WRONG_TYPE, f"token_ids: {error}") from None


def check_token_count(token_count: int, block_count: int, block_size: int) -> None:
    """Refuse tokens that do not exactly fill their blocks (TOKEN_COUNT); no tokens at all are fine."""
    if token_count and token_count != block_count * block_size:
        raise RefusedError(
            RejectReason.TOKEN_COUNT, f"{token_count} tokens for {block_count} blocks of {block_size} tokens"
        )
