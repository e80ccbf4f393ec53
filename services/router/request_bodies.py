"""Reads request bodies by hand: JSON, msgpack or raw tokens; no model validation per token.

Token ids become one little-endian u32 buffer. Values outside u32 wrap as a C cast would, as in the service
that this one replaces.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import orjson

from schemas.blocks import PLAIN_ROOT, U64_MASK, fold_block_extra, namespace_root, token_bytes
from schemas.registry import DEFAULT_TENANT, MAX_BLOCK_SIZE, MAX_NAME

Encoding = Literal["json", "msgpack"]
MAX_EXTRA_KEYS = 256

_msgpack_decoder = msgspec.msgpack.Decoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


class BodyRefusedError(ValueError):
    """A body that cannot be used; the text names the field and the fix. status: HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Query:
    """One question. tokens: LE u32 buffer, or content / sequence hashes instead. block_extra: block number -> keys."""

    model: str
    tenant: str
    block_size: int
    tokens: bytes | None
    content_hashes: array[int] | None = None
    sequence_hashes: array[int] | None = None
    root: int = PLAIN_ROOT
    block_extra: Mapping[int, tuple[str, ...]] | None = None
    instance_id: str | None = None


def encoding_of(content_type: str | None) -> Encoding:
    """The encoding that a Content-Type asks for; anything but msgpack is JSON."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    return "msgpack" if kind in ("application/msgpack", "application/x-msgpack") else "json"


def is_raw(content_type: str | None) -> bool:
    """Whether the body is tokens as raw little-endian u32, with the rest in the query string."""
    return (content_type or "").partition(";")[0].strip().lower() == "application/octet-stream"


def encode_body(value: object, encoding: Encoding) -> bytes:
    """A response body in the request's encoding."""
    return _msgpack_encoder.encode(value) if encoding == "msgpack" else orjson.dumps(value)


def decode_body(body: bytes, encoding: Encoding, what: str) -> dict[str, Any]:
    """A request body as a mapping. Raises BodyRefusedError."""
    try:
        value = _msgpack_decoder.decode(body) if encoding == "msgpack" else orjson.loads(body)
    except (orjson.JSONDecodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyRefusedError(f"invalid {what} request body: not {encoding}: {error}") from None
    if not isinstance(value, dict):
        raise BodyRefusedError(f"invalid {what} request body: must be an object of fields")
    return value


def read_query(fields: Mapping[str, Any], max_tokens: int, by_hash: bool, raw_tokens: bytes | None = None) -> Query:
    """A /query or /query_by_hash body as a Query. Raises BodyRefusedError naming the field."""
    what = "query_by_hash" if by_hash else "query"

    def text(name: str, default: str | None = None) -> str | None:
        value = fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > MAX_NAME:
            raise BodyRefusedError(f"invalid {what} request body: {name} must be text of at most {MAX_NAME} characters")
        return value

    model = text("model") or text("modelname")
    if not model:
        raise BodyRefusedError(f"invalid {what} request body: missing field model (the served model's name)")
    block_size = _block_size(fields.get("block_size"), what, required=not by_hash)
    lora_id = fields.get("lora_id")
    if lora_id is not None and (not isinstance(lora_id, int) or isinstance(lora_id, bool)):
        raise BodyRefusedError(f"invalid {what} request body: lora_id must be an integer")
    root = namespace_root(
        text("lora_name"), text("cache_salt"), _keys(fields.get("extra_keys"), "extra_keys", what), lora_id
    )
    common: dict[str, Any] = {
        "model": model,
        "tenant": text("tenant_id") or DEFAULT_TENANT,
        "block_size": block_size,
        "root": root,
        "instance_id": text("instance_id"),
        "block_extra": _block_extra(fields.get("block_extra_keys"), what),
    }
    if not by_hash:
        tokens = raw_tokens if raw_tokens is not None else _tokens(fields, what)
        if len(tokens) // 4 > max_tokens:
            raise BodyRefusedError(f"token_ids has {len(tokens) // 4} tokens, at most {max_tokens} are accepted", 413)
        return Query(tokens=tokens, **common)
    for name in ("seq_hashes", "block_hashes", "block_hash"):
        if fields.get(name) is not None:
            hashes = _hashes(fields[name], name, what, max_tokens)
            if name == "seq_hashes":
                return Query(tokens=None, sequence_hashes=hashes, **common)
            return Query(tokens=None, content_hashes=hashes, **common)
    raise BodyRefusedError(f"invalid {what} request body: missing field block_hashes (or seq_hashes)")


def folded(hashes: array[int], block_extra: Mapping[int, tuple[str, ...]] | None) -> array[int]:
    """Content hashes with the extra keys of their blocks folded in."""
    for number, keys in (block_extra or {}).items():
        if 0 <= number < len(hashes):
            hashes[number] = fold_block_extra(hashes[number], keys)
    return hashes


def _block_size(value: object, what: str, required: bool) -> int:
    if value is None and not required:
        return 1
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_BLOCK_SIZE:
        problem = "missing field block_size" if value is None else f"block_size is {value!r}"
        raise BodyRefusedError(
            f"invalid {what} request body: {problem}; it must be an integer from 1 to {MAX_BLOCK_SIZE}"
        )
    return value


def _tokens(fields: Mapping[str, Any], what: str) -> bytes:
    value = fields.get("token_ids")
    if isinstance(value, list):
        try:
            return token_bytes(value)
        except TypeError:
            raise BodyRefusedError(f"invalid {what} request body: token_ids must contain integers only") from None
    if isinstance(value, bytes):
        if len(value) % 4:
            raise BodyRefusedError(
                f"invalid {what} request body: token_ids as bytes must be little-endian u32, got {len(value)} bytes"
            )
        return value
    problem = "missing field token_ids" if value is None else "token_ids must be a list of integers or bytes"
    raise BodyRefusedError(f"invalid {what} request body: {problem}")


def _hashes(value: object, name: str, what: str, limit: int) -> array[int]:
    if isinstance(value, bytes):
        if len(value) % 8:
            raise BodyRefusedError(f"invalid {what} request body: {name} as bytes must be little-endian u64")
        packed = array("Q")
        packed.frombytes(value)
    elif isinstance(value, list):
        try:
            packed = array("Q", value)
        except OverflowError:
            packed = array("Q", [number & U64_MASK for number in value])
        except TypeError:
            raise BodyRefusedError(f"invalid {what} request body: {name} must contain integers only") from None
    else:
        raise BodyRefusedError(f"invalid {what} request body: {name} must be a list of integers or bytes")
    if len(packed) > limit:
        raise BodyRefusedError(f"{name} has {len(packed)} hashes, at most {limit} are accepted", 413)
    return packed


def _keys(value: object, name: str, what: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or len(value) > MAX_EXTRA_KEYS
        or not all(isinstance(key, str) and len(key) <= MAX_NAME for key in value)
    ):
        raise BodyRefusedError(
            f"invalid {what} request body: {name} must be a list of at most {MAX_EXTRA_KEYS} short texts"
        )
    return tuple(value)


def _block_extra(value: object, what: str) -> dict[int, tuple[str, ...]] | None:
    if value is None:
        return None
    name = "block_extra_keys"
    if not isinstance(value, dict) or len(value) > MAX_EXTRA_KEYS:
        raise BodyRefusedError(f"invalid {what} request body: {name} must map block numbers to lists of keys")
    result = {}
    for number, keys in value.items():
        if not str(number).isdecimal():
            raise BodyRefusedError(f"invalid {what} request body: {name} has {number!r}, which is no block number")
        result[int(number)] = _keys(keys, f"{name}[{number}]", what)
    return result
