"""The hot routes /query and /query_by_hash as plain ASGI: body in, prefix keys, coverage, body out."""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from schemas.registry import EngineRecord
from services.router import metrics
from services.router.answers import Answer, mooncake_answer, query_answer
from services.router.encodings import MEDIA_TYPES, BodyRefusedError, decode_body, encode_body, encoding_of, is_raw
from services.router.index.port import Coverage
from services.router.query_request import Query, Route, fields_of_query_string, read_query
from services.router.settings import RouterSettings
from services.router.space import NOTHING
from services.router.spaces import Spaces
from services.runtime.logging import get_logger

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TOKENS_FIELD = b"token_ids"
ROUTES: dict[str, Route] = {"/query": "query", "/query_by_hash": "query_by_hash"}
OUTCOMES = ("hit", "miss", "shorter_than_block", "other_block_size", "no_index", "refused", "starting", "failed")
OUTCOME_HEADER = b"x-kvroute-outcome"
FOLLOWING_HEADER = b"x-kvroute-index"

log = get_logger("query")


class _NotAnsweredError(Exception):
    """A question without an answer; carries status and outcome."""

    def __init__(self, status: int, outcome: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.outcome = outcome


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises BodyRefusedError (413) as soon as it exceeds the limit."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BodyRefusedError("the client went away")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyRefusedError(f"the body is larger than {limit} bytes (router.max_body_bytes)", 413)
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def header(scope: Scope, name: bytes) -> str | None:
    """A request header's value."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class QueryRoutes:
    """Answers queries from the spaces of this process. ready: set once the registry is known."""

    def __init__(self, spaces: Spaces, settings: RouterSettings) -> None:
        self._spaces = spaces
        self._settings = settings
        self.ready = False
        self._seconds = {path: metrics.QUERY_SECONDS.labels(path) for path in ROUTES}
        self._matched = {medium: metrics.MATCHED_BLOCKS.labels(medium) for medium in ("npu", "cpu", "disk")}
        self._outcomes = {
            (path, outcome): metrics.QUERIES.labels(path, outcome) for path in ROUTES for outcome in OUTCOMES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle POST /query or POST /query_by_hash."""
        started = time.perf_counter()
        path = scope["path"]
        content_type = header(scope, b"content-type")
        encoding = encoding_of(content_type)
        answer: object
        try:
            self._check_length(scope)
            body = await read_body(receive, self._settings.max_body_bytes)
            answer, outcome = self._answer(self._read(path, scope, body, content_type), started)
            status = 200
        except BodyRefusedError as error:
            answer, status, outcome = {"error": str(error)}, error.status, "refused"
        except _NotAnsweredError as error:
            answer, status, outcome = {"error": str(error)}, error.status, error.outcome
        except Exception:
            log.exception("query_failed", path=path)
            answer, status, outcome = {"error": "internal error, see the router's log"}, 500, "failed"
        content = encode_body(answer, encoding)
        headers = [
            (b"content-type", MEDIA_TYPES[encoding].encode()),
            (b"content-length", str(len(content)).encode()),
            (b"access-control-allow-origin", b"*"),
            (OUTCOME_HEADER, outcome.encode()),
            (FOLLOWING_HEADER, self._spaces.standings.following.encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
        self._outcomes[path, outcome].inc()
        self._seconds[path].observe(time.perf_counter() - started)

    def _check_length(self, scope: Scope) -> None:
        length = header(scope, b"content-length")
        if length is not None and length.isdecimal() and int(length) > self._settings.max_body_bytes:
            raise BodyRefusedError(
                f"the body is larger than {self._settings.max_body_bytes} bytes (router.max_body_bytes)", 413
            )

    def _read(self, path: str, scope: Scope, body: bytes, content_type: str | None) -> Query:
        route = ROUTES[path]
        if not is_raw(content_type):
            fields = decode_body(body, encoding_of(content_type), route, TOKENS_FIELD if route == "query" else None)
            return read_query(fields, route, self._settings.max_tokens)
        if route != "query":
            raise BodyRefusedError("/query_by_hash takes JSON or msgpack, not raw tokens", 415)
        if len(body) % 4:
            raise BodyRefusedError(f"a raw body must be little-endian u32 tokens, got {len(body)} bytes")
        fields = fields_of_query_string(scope["query_string"])
        return read_query(fields, route, self._settings.max_tokens, raw_tokens=body)

    def _answer(self, query: Query, started: float) -> tuple[Answer, str]:
        if not self.ready:
            raise _NotAnsweredError(503, "starting", "starting: the registry (NATS) is not reached yet, try again")
        space = self._spaces.find(query.model, query.tenant)
        if space is None:
            raise _NotAnsweredError(404, "no_index", f"no indexer for model={query.model} tenant={query.tenant}")
        # Hashing and matching are one; they are taken apart only for the log line that tells their times.
        detailed = log.is_enabled_for(logging.DEBUG)
        hashing = time.perf_counter()
        keys = query.keys() if detailed else b""
        matching = time.perf_counter()
        coverages = space.match(keys) if detailed else query.match(space)
        matched = time.perf_counter()
        engines: Sequence[EngineRecord] = space.engines
        if query.instance_id is not None:
            chosen = [i for i, engine in enumerate(engines) if engine.instance_id == query.instance_id]
            engines, coverages = [engines[i] for i in chosen], [coverages[i] for i in chosen]
        dialect = query.dialect
        if dialect is None and engines and all(engine.registered_with == "mooncake" for engine in engines):
            dialect = "mooncake"
        shape = mooncake_answer if dialect == "mooncake" else query_answer
        answer = shape(query.tenant, engines, coverages, query.block_size, self._spaces.standings)
        best = max(coverages, key=sum, default=NOTHING)
        outcome = _outcome(query, best, engines)
        self._count(query.blocks, best)
        if not detailed:
            return answer, outcome
        log.debug(
            "query",
            model=query.model,
            tenant=query.tenant,
            outcome=outcome,
            blocks=query.blocks,
            npu_blocks=best.npu,
            cpu_blocks=best.cpu_local + best.cpu_remote,
            disk_blocks=best.disk_local + best.disk_remote,
            hash_us=round((matching - hashing) * 1e6, 1),
            match_us=round((matched - matching) * 1e6, 1),
            total_us=round((time.perf_counter() - started) * 1e6, 1),
        )
        return answer, outcome

    def _count(self, blocks: int, best: Coverage) -> None:
        metrics.QUERIED_BLOCKS.inc(blocks)
        self._matched["npu"].inc(best.npu)
        self._matched["cpu"].inc(best.cpu_local + best.cpu_remote)
        self._matched["disk"].inc(best.disk_local + best.disk_remote)


def _outcome(query: Query, best: Coverage, engines: Sequence[EngineRecord]) -> str:
    """What the answer amounts to; a zero has a reason of its own where there is one."""
    if any(best):
        return "hit"
    if not query.blocks:
        return "shorter_than_block"
    if query.hashes is None and engines and all(engine.block_size != query.block_size for engine in engines):
        return "other_block_size"
    return "miss"
