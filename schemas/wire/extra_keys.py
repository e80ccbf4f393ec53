"""vLLM's extra_keys: which part is the adapter, which the cache salt, which belongs to a block (images and the like).

The engine sends one list (or nil) per block, untagged up to its newest releases, in the order adapter, images, salt,
prompt embeddings. Read in this order:

1. A first text equal to the event's lora_name is the adapter.
2. ``["lora", name, path]`` is the adapter where it names the event's, or where the chain's first block names one and
   the event none. ``["cache_salt", salt]`` is the salt in the first block of a chain.
3. In the first block of a chain (no parent), when no pair named a salt, the last bare text is the salt.
4. Everything else is a key of its block, in canonical text (``canonical_key``).

This fails closed: whatever is not understood becomes a block key, and a block with a key is found only by a request
that states it. What has no canonical text is refused with its event.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.wire.limits import Limits
from schemas.wire.raw import TOO_DEEP, is_nil, list_view
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason

SALT_TAG = "cache_salt"
LORA_TAG = "lora"
MAX_BLOCK_BYTES = 64 * 1024

NILS = memoryview(b"\xc0" * 65_536)

_blocks = msgspec.msgpack.Decoder(list[msgspec.Raw])
_keys = msgspec.msgpack.Decoder(list[Any])


@dataclass(frozen=True, slots=True)
class Namespace:
    """What extra_keys say. block_keys: one tuple per block, empty when no block has any."""

    lora_name: str | None
    cache_salt: str | None
    block_keys: tuple[tuple[str, ...], ...]


def read_extra_keys(
    extra_keys: msgspec.Raw, block_count: int, lora_name: str | None, starts_chain: bool, limits: Limits
) -> Namespace:
    """Interpret the extra keys of one stored event of ``block_count`` blocks.

    Raises RefusedError: WRONG_TYPE for what is no list of lists, LIMIT for more keys or longer ones than allowed,
    WRONG_SHAPE for keys of more blocks than the event has.
    """
    if is_nil(extra_keys):
        return Namespace(lora_name, None, ())
    elements = list_view(extra_keys, "extra_keys", limits.hashes)
    if len(elements) <= block_count and elements == NILS[: len(elements)]:
        # What nearly every event says: no block has any keys.
        return Namespace(lora_name, None, ())
    try:
        raw_blocks = _blocks.decode(extra_keys)
    except RecursionError:
        raise RefusedError(RejectReason.LIMIT, f"extra_keys: {TOO_DEEP}") from None
    if len(raw_blocks) > block_count:
        raise RefusedError(RejectReason.WRONG_SHAPE, f"extra_keys of {len(raw_blocks)} blocks, {block_count} stored")
    salt: str | None = None
    blocks: list[tuple[str, ...]] = []
    # Adapters repeat the same bytes in every block: each is read once.
    known: dict[bytes, tuple[str, ...]] = {}
    total = 0
    for number, raw in enumerate(raw_blocks):
        if number == 0:
            keys = _block(raw, limits)
            lora_name, keys = _take_adapter(keys, lora_name, may_name=True)
            if starts_chain:
                salt, keys = _take_salt(keys)
            blocks.append(_canonical(keys, limits))
        else:
            packed = bytes(raw)
            if packed not in known:
                known[packed] = _canonical(_take_adapter(_block(raw, limits), lora_name)[1], limits)
            blocks.append(known[packed])
        total += len(blocks[-1])
        if total > limits.hashes:
            raise RefusedError(RejectReason.LIMIT, f"more than {limits.hashes} extra keys in one event")
    for name, text in (("adapter", lora_name), ("cache salt", salt)):
        if text is not None and len(text) > limits.text:
            raise RefusedError(RejectReason.LIMIT, f"{name} of {len(text)} characters, at most {limits.text} are read")
    return Namespace(lora_name, salt, tuple(blocks) if total else ())


def _block(raw: msgspec.Raw, limits: Limits) -> list[Any]:
    if is_nil(raw):
        return []
    size = len(list_view(raw, "the extra keys of a block", limits.block_keys))
    if size > MAX_BLOCK_BYTES:
        raise RefusedError(RejectReason.LIMIT, f"the extra keys of a block take {size} bytes")
    try:
        return _keys.decode(raw)
    except RecursionError:
        raise RefusedError(RejectReason.LIMIT, f"extra_keys: {TOO_DEEP}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(RejectReason.WRONG_TYPE, f"extra_keys: {error}") from None


def _take_adapter(keys: list[Any], lora_name: str | None, may_name: bool = False) -> tuple[str | None, list[Any]]:
    """The adapter's name, and the keys that are not it."""
    rest = []
    for place, key in enumerate(keys):
        if place == 0 and lora_name is not None and key == lora_name:
            continue
        tagged = _tagged(key, LORA_TAG, (2, 3))
        if tagged and tagged == lora_name:
            continue
        if tagged and may_name and lora_name is None:
            lora_name = tagged
            continue
        rest.append(key)
    return lora_name, rest


def _take_salt(keys: list[Any]) -> tuple[str | None, list[Any]]:
    """The cache salt of a chain's first block, and the keys that are not it."""
    for place, key in enumerate(keys):
        tagged = _tagged(key, SALT_TAG, (2,))
        if tagged:
            return tagged, keys[:place] + keys[place + 1 :]
    for place in reversed(range(len(keys))):
        if isinstance(keys[place], str) and keys[place]:
            return keys[place], keys[:place] + keys[place + 1 :]
    return None, keys


def _tagged(key: object, tag: str, lengths: tuple[int, ...]) -> str | None:
    if isinstance(key, list) and len(key) in lengths and key[0] == tag and isinstance(key[1], str):
        return key[1]
    return None


def _canonical(keys: Sequence[object], limits: Limits) -> tuple[str, ...]:
    if not keys:
        return ()
    texts = tuple(canonical_key(key, limits.depth) for key in keys)
    longest = max(map(len, texts))
    if longest > limits.text:
        raise RefusedError(RejectReason.LIMIT, f"an extra key of {longest} characters")
    return texts


def canonical_key(key: object, depth: int = 8) -> str:
    """The text under which a request states a block's key.

    Text as it is, bytes as lower-case hex, ``[identifier, offset]`` as ``identifier:offset``, numbers, booleans, nil
    and other lists as compact JSON (bytes in them as hex). Raises RefusedError for maps and extension types
    (WRONG_TYPE) and for lists deeper than ``depth`` (LIMIT).
    """
    if isinstance(key, str):
        return key
    if isinstance(key, bytes):
        return key.hex()
    if isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str) and type(key[1]) is int:
        return f"{key[0]}:{key[1]}"
    return json.dumps(_plain(key, depth), separators=(",", ":"), ensure_ascii=False)


def _plain(value: object, depth: int) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if not isinstance(value, list | tuple):
        raise RefusedError(RejectReason.WRONG_TYPE, f"an extra key holds a {type(value).__name__}")
    if depth == 0:
        raise RefusedError(RejectReason.LIMIT, "an extra key has too many lists in lists")
    return [_plain(item, depth - 1) for item in value]
