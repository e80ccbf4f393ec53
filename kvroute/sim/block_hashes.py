"""Engine hashes as vLLM makes them: sha256 chained over pickled (parent, tokens, extra keys).

Reproduces vLLM 0.31 and newer with its default algorithm (tests compare with a real engine's capture).
"""

import hashlib
import pickle
from collections.abc import Sequence

UNSEEDED = "vllm-none-hash"
ExtraKeys = tuple[tuple[str, ...], ...]


def none_hash(seed: str | None = None) -> bytes:
    """The parent of a first block: fixed when no seed is set (vLLM 0.29 and newer), else the hash of PYTHONHASHSEED."""
    return _sha256(UNSEEDED if seed is None else seed)


def namespace_keys(cache_salt: str | None, lora_name: str | None) -> ExtraKeys:
    """The tagged extra keys that go into a hash; a salt goes into a sequence's first block, a LoRA into every block."""
    lora: ExtraKeys = (("lora", lora_name, ""),) if lora_name else ()
    return lora + ((("cache_salt", cache_salt),) if cache_salt else ())


def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    *,
    root: bytes,
    cache_salt: str | None = None,
    lora_name: str | None = None,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Hash of every whole block of a sequence; ``known`` are the hashes of its first blocks, computed before."""
    hashes = list(known)
    first_keys = namespace_keys(cache_salt, lora_name) or None
    later_keys = namespace_keys(None, lora_name) or None
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else root
        keys = later_keys if hashes else first_keys
        hashes.append(_sha256((parent, tuple(tokens[start : start + block_size]), keys)))
    return hashes


def low64(block_hash: bytes) -> int:
    """The form in which a hash travels in events: its trailing 8 bytes as a big-endian u64."""
    return int.from_bytes(block_hash[-8:], "big")


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
