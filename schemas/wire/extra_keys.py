"""vLLM's extra_keys: which part is the adapter, which the cache salt, which belongs to a block (images and the like).

The engine sends them untagged up to its newest releases, one list per block. Read in this order:

1. A first text equal to the event's lora_name is the adapter.
2. Tagged pairs ``["cache_salt", s]`` and ``["lora", name, path]`` are what they say.
3. In the first block of a chain (no parent) a last bare text is the cache salt.
4. Everything else is a key of its block, in canonical text: a text as it is, ``[identifier, offset]`` as
   ``identifier:offset``, anything else as compact JSON.

This fails closed: what is taken for a salt or a block key makes the block unmatchable for a request that does not
state it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SALT_TAG = "cache_salt"
LORA_TAG = "lora"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What extra_keys say. block_keys: one tuple per block, empty when no block has any."""

    lora_name: str | None
    cache_salt: str | None
    block_keys: tuple[tuple[str, ...], ...]


def read_extra_keys(
    extra_keys: Sequence[Sequence[Any] | None] | None, lora_name: str | None, starts_chain: bool
) -> Namespace:
    """Interpret the extra keys of one stored event."""
    if not extra_keys or not any(extra_keys):
        return Namespace(lora_name, None, ())
    salt: str | None = None
    blocks: list[tuple[str, ...]] = []
    for number, keys in enumerate(extra_keys):
        rest = list(keys or ())
        if rest and lora_name is not None and rest[0] == lora_name:
            rest.pop(0)
        own: list[str] = []
        for key in rest:
            if isinstance(key, list | tuple) and len(key) >= 2 and key[0] == LORA_TAG and isinstance(key[1], str):
                lora_name = lora_name or key[1]
            elif isinstance(key, list | tuple) and len(key) == 2 and key[0] == SALT_TAG and isinstance(key[1], str):
                salt = key[1] if number == 0 and starts_chain else salt
            else:
                own.append(key)
        if number == 0 and starts_chain and salt is None and own and isinstance(own[-1], str):
            salt = own.pop()
        blocks.append(tuple(canonical_key(key) for key in own))
    return Namespace(lora_name, salt, tuple(blocks) if any(blocks) else ())


def canonical_key(key: object) -> str:
    """The text under which a request states a block's key."""
    if isinstance(key, str):
        return key
    if isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
        return f"{key[0]}:{key[1]}"
    return json.dumps(_plain(key), separators=(",", ":"), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
