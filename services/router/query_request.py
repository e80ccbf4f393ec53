"""Reads /query and /query_by_hash by hand: no model validation per token, one buffer from body to hash.

Token ids become one little-endian u32 buffer. Values outside u32 wrap as a C cast would, as in the service
that this one replaces.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import parse_qs

import orjson

from schemas.blocks import (
    PLAIN_ROOT,
    U64_MASK,
    content_hashes,
    fold_block_extra,
    namespace_root,
    prefix_keys,
    token_bytes,
)
from schemas.native import HASHING_IS_COMPILED, hashing
from schemas.registry import DEFAULT_TENANT, MAX_BLOCK_SIZE, MAX_NAME, RegistrationDialect
from schemas.wire.extra_keys import canonical_key
from schemas.wire.refusal import RefusedError
from services.router.encodings import BodyRefusedError, decode_body
from services.router.index.port import Coverage
from services.router.space import Space

Route = Literal["query", "query_by_hash"]
BlockExtra = Mapping[int, tuple[str, ...]]
MAX_EXTRA_KEYS = 256
MAX_BLOCKS_WITH_KEYS = 65_536
MAX_FIELDS = 64
MAX_REMEMBERED_BYTES = 2048
_NAMESPACE_FIELDS = ("lora_name", "lora_id", "cache_salt", "extra_keys", "block_extra_keys")


@dataclass(frozen=True, slots=True)
class Query:
    """One question. tokens: LE u32 buffer; or hashes: of contents, or rolling ones, which are prefix keys already.

    block_extra: keys of single blocks by number. dialect: shape of the answer, None: that of the registrations.
    """

    model: str
    tenant: str
    block_size: int
    tokens: bytes = b""
    hashes: array[int] | None = None
    rolling: bool = False
    root: int = PLAIN_ROOT
    block_extra: BlockExtra | None = None
    instance_id: str | None = None
    dialect: RegistrationDialect | None = None

    def of(self, tokens: bytes) -> Query:
        """The same question about other tokens."""
        return Query(
            self.model,
            self.tenant,
            self.block_size,
            tokens,
            root=self.root,
            block_extra=self.block_extra,
            instance_id=self.instance_id,
            dialect=self.dialect,
        )

    @property
    def blocks(self) -> int:
        """Whole blocks asked for."""
        return len(self.tokens) // (4 * self.block_size) if self.hashes is None else len(self.hashes)

    def match(self, space: Space) -> list[Coverage]:
        """What each engine of a space has of this, in the space's order; hashed no further than it needs to be."""
        if self.block_extra or self.rolling:
            return space.match(self.keys())
        if self.hashes is not None:
            return space.match_contents(self.hashes, self.root)
        return space.match_tokens(self.tokens, self.block_size, self.root)

    def keys(self) -> bytes:
        """Packed prefix keys of the whole blocks asked for."""
        if self.rolling and self.hashes is not None:
            return self.hashes.tobytes()
        hashes = content_hashes(self.tokens, self.block_size) if self.hashes is None else self.hashes
        for number, keys in (self.block_extra or {}).items():
            if number < len(hashes):
                hashes[number] = fold_block_extra(hashes[number], keys)
        return prefix_keys(hashes, self.root).tobytes()


class _Fields:
    """Reads single fields of a body; every refusal names the route's body and the field."""

    def __init__(self, values: Mapping[str, Any], route: Route) -> None:
        self.values = values
        self._route = route

    def refused(self, problem: str, status: int = 400) -> BodyRefusedError:
        return BodyRefusedError(f"invalid {self._route} request body: {problem}", status)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > MAX_NAME:
            raise self.refused(f"{name} must be text of at most {MAX_NAME} characters")
        return value

    def integer(self, name: str) -> int | None:
        value = self.values.get(name)
        if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
            value = int(value)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.refused(f"{name} must be an integer, got {str(value)[:40]!r}")
        return value

    def block_size(self, required: bool) -> int:
        value = self.integer("block_size")
        if value is None and not required:
            return 1
        if value is None or not 1 <= value <= MAX_BLOCK_SIZE:
            problem = "missing field block_size" if value is None else f"block_size is {value}"
            raise self.refused(f"{problem}; it must be an integer from 1 to {MAX_BLOCK_SIZE}")
        return value

    def dialect(self) -> RegistrationDialect | None:
        value = self.text("dialect")
        if value is None:
            return None
        if value == "conductor":
            return "conductor"
        if value == "mooncake":
            return "mooncake"
        raise self.refused(f"dialect is {value!r}; use conductor or mooncake, or leave it out")

    def keys(self, value: object, name: str) -> tuple[str, ...]:
        """Extra keys in the canonical text of schemas.wire.extra_keys."""
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > MAX_EXTRA_KEYS:
            raise self.refused(f"{name} must be a list of at most {MAX_EXTRA_KEYS} keys")
        try:
            texts = tuple(canonical_key(key) for key in value)
        except RefusedError as error:
            raise self.refused(f"{name}: {error}") from None
        if any(len(text) > MAX_NAME for text in texts):
            raise self.refused(f"{name} has a key of more than {MAX_NAME} characters")
        return texts

    def extra_keys(self) -> tuple[tuple[str, ...], BlockExtra]:
        """Keys of the whole chain, and keys of single blocks.

        ``extra_keys`` is either a list of texts (the chain's) or, as in events, a list with a list or null per block.
        ``block_extra_keys`` maps block numbers to lists.
        """
        value = self.values.get("extra_keys")
        if isinstance(value, list) and any(item is None or isinstance(item, list) for item in value):
            numbered: dict[Any, Any] = dict(enumerate(value))
            chain: tuple[str, ...] = ()
        else:
            numbered, chain = {}, self.keys(value, "extra_keys")
        more = self.values.get("block_extra_keys")
        if more is not None and not isinstance(more, dict):
            raise self.refused("block_extra_keys must map block numbers to lists of keys")
        numbered |= more or {}
        if len(numbered) > MAX_BLOCKS_WITH_KEYS:
            raise self.refused(f"at most {MAX_BLOCKS_WITH_KEYS} blocks can have extra keys")
        blocks = {}
        for number, keys in numbered.items():
            if not str(number).isdecimal() or len(str(number)) > 9:
                raise self.refused(f"block_extra_keys has {str(number)[:40]!r}, which is no block number")
            if texts := self.keys(keys, f"extra keys of block {number}"):
                blocks[int(number)] = texts
        return chain, blocks

    def tokens(self) -> bytes:
        value = self.values.get("token_ids")
        if isinstance(value, list):
            try:
                return token_bytes(value)
            except TypeError:
                raise self.refused("token_ids must contain integers only") from None
        if isinstance(value, bytes):
            if len(value) % 4:
                raise self.refused(f"token_ids as bytes must be little-endian u32, got {len(value)} bytes")
            return value
        problem = "missing field token_ids" if value is None else "token_ids must be a list of integers or bytes"
        raise self.refused(problem)

    def hashes(self, name: str) -> array[int]:
        value = self.values[name]
        packed = array("Q")
        if isinstance(value, bytes):
            if len(value) % 8:
                raise self.refused(f"{name} as bytes must be little-endian u64, got {len(value)} bytes")
            packed.frombytes(value)
            return packed
        if not isinstance(value, list):
            raise self.refused(f"{name} must be a list of integers or bytes")
        try:
            return array("Q", value)
        except OverflowError:
            return array("Q", [number & U64_MASK for number in value])
        except TypeError:
            raise self.refused(f"{name} must contain integers only") from None


def read_query(values: Mapping[str, Any], route: Route, max_tokens: int, raw_tokens: bytes | None = None) -> Query:
    """A body as a Query. raw_tokens: tokens that came beside the other fields. Raises BodyRefusedError."""
    fields = _Fields(values, route)
    model = fields.text("model") or fields.text("modelname")
    if not model:
        raise fields.refused("missing field model (the served model's name)")
    chain, block_extra = fields.extra_keys()
    common: dict[str, Any] = {
        "model": model,
        "tenant": fields.text("tenant_id") or DEFAULT_TENANT,
        "block_size": fields.block_size(required=route == "query"),
        "root": namespace_root(fields.text("lora_name"), fields.text("cache_salt"), chain, fields.integer("lora_id")),
        "block_extra": block_extra,
        "instance_id": fields.text("instance_id"),
        "dialect": fields.dialect(),
    }
    if route == "query":
        tokens = raw_tokens if raw_tokens is not None else fields.tokens()
        return Query(tokens=_limited(tokens, max_tokens), **common)
    name = next((name for name in ("seq_hashes", "block_hash", "block_hashes") if values.get(name) is not None), None)
    if name is None:
        raise fields.refused("missing field block_hashes (content hashes) or seq_hashes (rolling hashes)")
    rolling = name != "block_hashes"
    if rolling and (common["root"] != PLAIN_ROOT or block_extra):
        raise fields.refused(
            f"{name} are rolling hashes, which contain their namespace already; send block_hashes beside "
            + ", ".join(field for field in _NAMESPACE_FIELDS if values.get(field) is not None)
        )
    hashes = fields.hashes(name)
    if len(hashes) > max_tokens:
        raise BodyRefusedError(f"{name} has {len(hashes)} hashes, at most {max_tokens} are accepted", 413)
    return Query(hashes=hashes, rolling=rolling, **common)


def _limited(tokens: bytes, max_tokens: int) -> bytes:
    if len(tokens) // 4 > max_tokens:
        raise BodyRefusedError(
            f"token_ids has {len(tokens) // 4} tokens, at most {max_tokens} are accepted (router.max_tokens)", 413
        )
    return tokens


def read_raw_query(tokens: bytes, query_string: bytes, max_tokens: int) -> Query:
    """A body of little-endian u32 tokens with the rest in the URL. Raises BodyRefusedError."""
    if len(tokens) % 4:
        raise BodyRefusedError(f"a raw body must be little-endian u32 tokens, got {len(tokens)} bytes")
    return _question_in_url(query_string).of(_limited(tokens, max_tokens))


def read_json_query(body: bytes, max_tokens: int) -> Query:
    """A JSON body of /query. Raises BodyRefusedError."""
    taken = hashing.take_tokens(body, b"token_ids") if HASHING_IS_COMPILED else None
    if taken is None:
        return read_query(decode_body(body, "json", "query"), "query", max_tokens)
    rest, tokens = taken
    read = _question_in_json if len(rest) <= MAX_REMEMBERED_BYTES else _question_in_json.__wrapped__
    return read(rest).of(_limited(tokens, max_tokens))


# What callers ask beside the tokens is much the same from request to request.
@lru_cache(maxsize=1024)
def _question_in_url(query_string: bytes) -> Query:
    return read_query(fields_of_query_string(query_string), "query", 0, b"")


@lru_cache(maxsize=1024)
def _question_in_json(body: bytes) -> Query:
    return read_query(decode_body(body, "json", "query"), "query", 0)


def fields_of_query_string(query_string: bytes) -> dict[str, Any]:
    """The fields of a raw body's URL: ``extra_keys`` may be repeated, ``block_extra_keys`` is JSON.

    Raises BodyRefusedError.
    """
    try:
        lists = parse_qs(
            query_string.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"
        )
    except (ValueError, UnicodeDecodeError) as error:
        raise BodyRefusedError(f"invalid query string: {error}") from None
    values: dict[str, Any] = {name: texts[-1] for name, texts in lists.items()}
    if "extra_keys" in lists:
        values["extra_keys"] = lists["extra_keys"]
    if "block_extra_keys" in lists:
        try:
            values["block_extra_keys"] = orjson.loads(values["block_extra_keys"])
        except orjson.JSONDecodeError:
            raise BodyRefusedError("invalid query string: block_extra_keys must be a JSON object") from None
    return values
