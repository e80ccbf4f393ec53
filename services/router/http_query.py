"""The hot routes /query and /query_by_hash as plain ASGI: body in, prefix keys, coverage, body out."""

import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from schemas.registry import EngineRecord
from services.router import metrics
from services.router.answer_text import AnswerText
from services.router.answers import mooncake_answer, query_answer
from services.router.encodings import (
    MEDIA_TYPES,
    BodyRefusedError,
    Encoding,
    decode_body,
    encode_body,
    encoding_of,
    is_raw,
)
from services.router.index.port import NOTHING, Coverage
from services.router.query_request import Query, Route, read_json_query, read_query, read_raw_query
from services.router.settings import RouterSettings
from services.router.spaces import Spaces
from services.runtime.http_protocol import DirectAnswer, Headers
from services.runtime.logging import debug_is_on, get_logger

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

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


def header(headers: Headers, name: bytes) -> str | None:
    """A request header's value."""
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


class QueryRoutes:
    """Answers queries from the spaces of this process. ready: set once the registry is known."""

    def __init__(self, spaces: Spaces, settings: RouterSettings) -> None:
        self._spaces = spaces
        self._settings = settings
        self.ready = False
        self._texts: dict[tuple[str, str], AnswerText] = {}
        self._seconds = {path: metrics.QUERY_SECONDS.labels(path) for path in ROUTES}
        self._matched = {medium: metrics.MATCHED_BLOCKS.labels(medium) for medium in ("npu", "cpu", "disk")}
        self._outcomes = {
            (path, outcome): metrics.QUERIES.labels(path, outcome) for path in ROUTES for outcome in OUTCOMES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle POST /query or POST /query_by_hash as ASGI application."""
        try:
            self._check_length(scope["headers"])
            body = await read_body(receive, self.max_body_bytes)
        except BodyRefusedError as error:
            status, headers, content = self.refuse(scope["path"], scope["headers"], str(error), error.status)
        else:
            status, headers, content = self.answer(scope["path"], scope["query_string"], scope["headers"], body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    @property
    def max_body_bytes(self) -> int:
        """The largest body that is read."""
        return self._settings.max_body_bytes

    def answer(self, path: str, query_string: bytes, headers: Headers, body: bytes) -> DirectAnswer:
        """Status, headers and body of the answer to a whole request."""
        started = time.perf_counter()
        content_type = header(headers, b"content-type")
        encoding = encoding_of(content_type)
        try:
            query = self._read(path, query_string, body, content_type)
            content, outcome = self._answer(query, started, encoding)
            status = 200
        except (BodyRefusedError, _NotAnsweredError) as error:
            content, status = encode_body({"error": str(error)}, encoding), error.status
            outcome = error.outcome if isinstance(error, _NotAnsweredError) else "refused"
        except Exception:
            log.exception("query_failed", path=path)
            content = encode_body({"error": "internal error, see the router's log"}, encoding)
            status, outcome = 500, "failed"
        self._outcomes[path, outcome].inc()
        self._seconds[path].observe(time.perf_counter() - started)
        return status, self._headers(encoding, len(content), outcome), content

    def refuse(self, path: str, headers: Headers, text: str, status: int) -> DirectAnswer:
        """The answer to a request whose body is not read to its end."""
        encoding = encoding_of(header(headers, b"content-type"))
        content = encode_body({"error": text}, encoding)
        self._outcomes[path, "refused"].inc()
        return status, self._headers(encoding, len(content), "refused"), content

    def _headers(self, encoding: Encoding, length: int, outcome: str) -> Headers:
        return [
            (b"content-type", MEDIA_TYPES[encoding].encode()),
            (b"content-length", b"%d" % length),
            (b"access-control-allow-origin", b"*"),
            (OUTCOME_HEADER, outcome.encode()),
            (FOLLOWING_HEADER, self._spaces.standings.following.encode()),
        ]

    def _check_length(self, headers: Headers) -> None:
        length = header(headers, b"content-length")
        if length is not None and length.isdecimal() and int(length) > self.max_body_bytes:
            raise BodyRefusedError(f"the body is larger than {self.max_body_bytes} bytes (router.max_body_bytes)", 413)

    def _read(self, path: str, query_string: bytes, body: bytes, content_type: str | None) -> Query:
        route, encoding, max_tokens = ROUTES[path], encoding_of(content_type), self._settings.max_tokens
        if is_raw(content_type):
            if route != "query":
                raise BodyRefusedError("/query_by_hash takes JSON or msgpack, not raw tokens", 415)
            return read_raw_query(body, query_string, max_tokens)
        if route == "query" and encoding == "json":
            return read_json_query(body, max_tokens)
        return read_query(decode_body(body, encoding, route), route, max_tokens)

    def _answer(self, query: Query, started: float, encoding: Encoding) -> tuple[bytes, str]:
        if not self.ready:
            raise _NotAnsweredError(503, "starting", "starting: the registry (NATS) is not reached yet, try again")
        space = self._spaces.find(query.model, query.tenant)
        if space is None:
            raise _NotAnsweredError(404, "no_index", f"no indexer for model={query.model} tenant={query.tenant}")
        # Hashing and matching are one; they are taken apart only for the log line that tells their times.
        detailed = debug_is_on()
        hashing = time.perf_counter()
        keys = query.keys() if detailed else b""
        matching = time.perf_counter()
        coverages = space.match(keys) if detailed else query.match(space)
        matched = time.perf_counter()
        engines: Sequence[EngineRecord] = space.engines
        if query.instance_id is not None:
            chosen = [i for i, engine in enumerate(engines) if engine.instance_id == query.instance_id]
            engines, coverages = [engines[i] for i in chosen], [coverages[i] for i in chosen]
        content = self._content(query, engines, coverages, encoding)
        best = max((coverage for coverage in coverages if coverage is not NOTHING), key=sum, default=NOTHING)
        outcome = _outcome(query, best, engines)
        self._count(query.blocks, best)
        if not detailed:
            return content, outcome
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
        return content, outcome

    def _content(
        self, query: Query, engines: Sequence[EngineRecord], coverages: Sequence[Coverage], encoding: Encoding
    ) -> bytes:
        standings, tenant = self._spaces.standings, query.tenant
        dialect = query.dialect
        if dialect is None and engines and all(engine.registered_with == "mooncake" for engine in engines):
            dialect = "mooncake"
        if dialect == "mooncake":
            return encode_body(mooncake_answer(tenant, engines, coverages, query.block_size, standings), encoding)
        if encoding == "msgpack" or query.instance_id is not None:
            return encode_body(query_answer(tenant, engines, coverages, query.block_size, standings), encoding)
        text = self._texts.get((query.model, tenant))
        if text is None:
            if len(self._texts) > 2 * len(self._spaces.spaces):
                self._texts.clear()
            text = self._texts[query.model, tenant] = AnswerText()
        return text.render(tenant, engines, coverages, query.block_size, standings)

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
