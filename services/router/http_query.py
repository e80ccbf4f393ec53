"""The hot routes /query and /query_by_hash as plain ASGI: body in, prefix keys, coverage, body out."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from schemas.blocks import content_hashes, prefix_keys
from services.router import metrics
from services.router.answers import matched_blocks, query_answer
from services.router.index.port import Coverage
from services.router.request_bodies import (
    BodyRefusedError,
    Query,
    decode_body,
    encode_body,
    encoding_of,
    folded,
    is_raw,
    read_query,
)
from services.router.settings import RouterSettings
from services.router.spaces import Spaces
from services.runtime.logging import get_logger

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MEDIA_TYPES = {"json": b"application/json", "msgpack": b"application/msgpack"}

log = get_logger("query")


class NoIndexError(LookupError):
    """Neither a registration nor an event made this space."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises BodyRefusedError (413) as soon as it exceeds the limit."""
    message = await receive()
    body = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > limit:
            raise BodyRefusedError(f"the body is larger than {limit} bytes (router.max_body_bytes)", 413)
        return bytes(body)
    chunks, size = [body], len(body)
    while True:
        if size > limit:
            raise BodyRefusedError(f"the body is larger than {limit} bytes (router.max_body_bytes)", 413)
        if not message.get("more_body"):
            return b"".join(chunks)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BodyRefusedError("the client went away", 400)
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)


async def send_response(send: Send, status: int, body: bytes, media_type: bytes) -> None:
    """A complete response."""
    headers = [
        (b"content-type", media_type),
        (b"content-length", str(len(body)).encode()),
        (b"access-control-allow-origin", b"*"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


class QueryRoutes:
    """Answers queries from the spaces of this process."""

    def __init__(self, spaces: Spaces, settings: RouterSettings) -> None:
        self._spaces = spaces
        self._settings = settings
        self._seconds = {route: metrics.QUERY_SECONDS.labels(route) for route in ("/query", "/query_by_hash")}
        self._matched = {medium: metrics.MATCHED_BLOCKS.labels(medium) for medium in ("npu", "cpu", "disk")}
        self._outcomes = {
            (route, outcome): metrics.QUERIES.labels(route, outcome)
            for route in ("/query", "/query_by_hash")
            for outcome in ("hit", "miss", "shorter_than_block", "no_index", "refused")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle POST /query or POST /query_by_hash."""
        started = time.perf_counter()
        route = scope["path"]
        content_type = _header(scope, b"content-type")
        encoding = encoding_of(content_type)
        try:
            body = await read_body(receive, self._settings.max_body_bytes)
            query = self._read(route, scope, body, content_type)
            answer, outcome = self._answer(query, started)
            status = 200
        except BodyRefusedError as error:
            answer, status, outcome = {"error": str(error)}, error.status, "refused"
        except NoIndexError as error:
            answer, status, outcome = {"error": str(error)}, 404, "no_index"
        await send_response(send, status, encode_body(answer, encoding), MEDIA_TYPES[encoding])
        self._outcomes[route, outcome].inc()
        self._seconds[route].observe(time.perf_counter() - started)

    def _read(self, route: str, scope: Scope, body: bytes, content_type: str | None) -> Query:
        by_hash = route == "/query_by_hash"
        if is_raw(content_type):
            if by_hash:
                raise BodyRefusedError("/query_by_hash takes JSON or msgpack, not raw tokens", 415)
            if len(body) % 4:
                raise BodyRefusedError(f"a raw body must be little-endian u32 tokens, got {len(body)} bytes")
            fields = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
            return read_query(fields, self._settings.max_tokens, by_hash=False, raw_tokens=body)
        fields = decode_body(body, encoding_of(content_type), "query_by_hash" if by_hash else "query")
        return read_query(fields, self._settings.max_tokens, by_hash)

    def _answer(self, query: Query, started: float) -> tuple[dict[str, Any], str]:
        space = self._spaces.find(query.model, query.tenant)
        if space is None:
            raise NoIndexError(f"no indexer for model={query.model} tenant={query.tenant}")
        hashing = time.perf_counter()
        keys = self._keys(query)
        matching = time.perf_counter()
        coverages = space.index.match(keys, space.candidates, space.pool_holders)
        engines = space.engines
        if query.instance_id is not None:
            chosen = [i for i, engine in enumerate(engines) if engine.instance_id == query.instance_id]
            engines, coverages = tuple(engines[i] for i in chosen), [coverages[i] for i in chosen]
        mooncake = bool(engines) and all(engine.registered_with == "mooncake" for engine in engines)
        answer = query_answer(query.tenant, engines, coverages, query.block_size, mooncake)
        finished = time.perf_counter()
        best = max(coverages, key=matched_blocks, default=Coverage(0, 0, 0, 0, 0))
        self._count(len(keys) // 8, best)
        log.debug(
            "query",
            model=query.model,
            tenant=query.tenant,
            blocks=len(keys) // 8,
            npu_blocks=best.npu,
            cpu_blocks=best.cpu_local + best.cpu_remote,
            disk_blocks=best.disk_local + best.disk_remote,
            hash_us=round((matching - hashing) * 1e6, 1),
            match_us=round((finished - matching) * 1e6, 1),
            total_us=round((finished - started) * 1e6, 1),
        )
        if not keys:
            return answer, "shorter_than_block"
        return answer, "hit" if matched_blocks(best) else "miss"

    def _keys(self, query: Query) -> bytes:
        if query.sequence_hashes is not None:
            return query.sequence_hashes.tobytes()
        hashes = query.content_hashes
        if hashes is None:
            hashes = content_hashes(query.tokens or b"", query.block_size)
        return prefix_keys(folded(hashes, query.block_extra), query.root).tobytes()

    def _count(self, blocks: int, best: Coverage) -> None:
        metrics.QUERIED_BLOCKS.inc(blocks)
        self._matched["npu"].inc(best.npu)
        self._matched["cpu"].inc(best.cpu_local + best.cpu_remote)
        self._matched["disk"].inc(best.disk_local + best.disk_remote)
