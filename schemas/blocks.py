"""Block identity: content hashes, prefix keys and the namespaces they live in.

Rules (Mooncake RFC 1527, and the check vectors in tests/unit/test_blocks.py):

* ``content_hash`` = XXH3-64, seed 1337, over a block's tokens as little-endian u32. Whole blocks only.
* ``prefix_key[0] = content_hash[0]`` in the plain namespace, else ``XXH3(root || content_hash[0])``;
  ``prefix_key[i] = XXH3(prefix_key[i-1] || content_hash[i])``; u64 little-endian, same seed.
* ``root`` folds LoRA, cache salt and extra keys, each tagged with its kind; 0 means the plain namespace.
* Multimodal keys fold into the content hash of the block that carries them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum

import xxhash

from schemas.native import HASHING_IS_COMPILED, hashing

HASH_SEED = 1337
U64_MASK = (1 << 64) - 1
PLAIN_ROOT = 0

_PAIR = struct.Struct("<QQ")


class Tier(StrEnum):
    """Where a block lies, in the words of logs, metrics and answers."""

    NPU = "npu"
    CPU = "cpu"
    DISK = "disk"


MEDIUM_TIERS: dict[str, Tier] = {
    **dict.fromkeys(("npu", "gpu", "xpu", "hbm", "device"), Tier.NPU),
    **dict.fromkeys(("cpu", "cpu_pinned", "dram", "host", "memory"), Tier.CPU),
    **dict.fromkeys(("disk", "ssd", "nvme", "nof_ssd", "dfs", "fs", "obj", "storage", "shared_storage"), Tier.DISK),
}


def tier_of_medium(medium: str) -> Tier | None:
    """The tier a publisher's medium word means, case-insensitive; None for an unknown word."""
    return MEDIUM_TIERS.get(medium.strip().lower())


class KeyKind(StrEnum):
    """The tag of a namespace component, so that an adapter "x" never equals a salt "x"."""

    LORA = "lora"
    LORA_ID = "lora_id"
    SALT = "salt"
    EXTRA = "extra"


def _fold(parts: Iterable[tuple[str, str]]) -> int:
    digest = xxhash.xxh3_64(seed=HASH_SEED)
    for kind, value in parts:
        for text in (kind, value):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<I", len(encoded)))
            digest.update(encoded)
    return digest.intdigest()


def namespace_root(
    lora_name: str | None = None,
    cache_salt: str | None = None,
    extra_keys: Sequence[str] = (),
    lora_id: int | None = None,
) -> int:
    """The root that a chain starts from; PLAIN_ROOT when nothing sets it apart.

    A LoRA name wins over a numeric id; empty text means absent. Never returns PLAIN_ROOT for a non-plain namespace.
    """
    parts: list[tuple[str, str]] = []
    if lora_name:
        parts.append((KeyKind.LORA, lora_name))
    elif lora_id is not None:
        parts.append((KeyKind.LORA_ID, str(lora_id)))
    if cache_salt:
        parts.append((KeyKind.SALT, cache_salt))
    parts.extend((KeyKind.EXTRA, key) for key in extra_keys)
    return (_fold(parts) or 1) if parts else PLAIN_ROOT


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Tokens as little-endian u32; values wrap as a C cast would (compatible with the replaced service)."""
    if not isinstance(token_ids, list | tuple):
        token_ids = list(token_ids)
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        packed = array("I", [token & 0xFFFFFFFF for token in token_ids])
    if packed.itemsize != 4:  # pragma: no cover - no supported platform has another size
        raise RuntimeError("array('I') is not 32 bits wide on this platform")
    return packed.tobytes()


def content_hashes(tokens: bytes | memoryview, block_size: int) -> array[int]:
    """Content hash of every whole block in a little-endian u32 token buffer; a partial tail is ignored.

    Raises ValueError when block_size is below 1.
    """
    if HASHING_IS_COMPILED:
        return unpack_hashes(hashing.content_hashes(tokens, block_size))
    return plain_content_hashes(tokens, block_size)


def plain_content_hashes(tokens: bytes | memoryview, block_size: int) -> array[int]:
    """The same in Python: where nothing was compiled, and to test what was."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    width = 4 * block_size
    view = memoryview(tokens).cast("B")
    digest = xxhash.xxh3_64_intdigest
    return array(
        "Q",
        [digest(view[start : start + width], HASH_SEED) for start in range(0, len(view) - width + 1, width)],
    )


def fold_block_extra(content_hash: int, extra_keys: Sequence[str]) -> int:
    """The content hash of a block that carries extra keys (image hashes and the like)."""
    if not extra_keys:
        return content_hash
    return chain(_fold((KeyKind.EXTRA, key) for key in extra_keys), content_hash)


def chain(previous: int, content_hash: int) -> int:
    """``XXH3(previous || content_hash)``: one step of the rolling prefix key."""
    return xxhash.xxh3_64_intdigest(_PAIR.pack(previous, content_hash), HASH_SEED)


def first_key(root: int, content_hash: int) -> int:
    """The prefix key of a chain's first block in the namespace ``root``."""
    return content_hash if root == PLAIN_ROOT else chain(root, content_hash)


def prefix_keys(hashes: Iterable[int], root: int = PLAIN_ROOT) -> array[int]:
    """Rolling prefix keys of consecutive blocks from ``root`` on."""
    if HASHING_IS_COMPILED:
        return unpack_hashes(hashing.prefix_keys(hashes if isinstance(hashes, array) else array("Q", hashes), root))
    return plain_prefix_keys(hashes, root)


def plain_prefix_keys(hashes: Iterable[int], root: int = PLAIN_ROOT) -> array[int]:
    """The same in Python."""
    keys = array("Q")
    previous = None
    for content_hash in hashes:
        previous = first_key(root, content_hash) if previous is None else chain(previous, content_hash)
        keys.append(previous)
    return keys


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """u64 values as packed little-endian bytes, the form in which hashes travel."""
    return array("Q", hashes).tobytes()


def unpack_hashes(packed: bytes | bytearray | memoryview | array[int]) -> array[int]:
    """The reverse of pack_hashes, from any buffer. Raises ValueError when its length is not a multiple of 8 bytes."""
    view = memoryview(packed).cast("B")
    if len(view) % 8:
        raise ValueError(f"packed hashes must be a multiple of 8 bytes long, got {len(view)}")
    values = array("Q")
    values.frombytes(view)
    return values
