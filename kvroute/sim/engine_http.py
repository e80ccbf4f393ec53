"""The HTTP interface of a simulated engine: the part of vLLM's API server that routers and gateways use."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import prometheus_client
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvroute.sim.engine_requests import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    chat_prompt,
    detokenize,
    prompt_tokens,
    tokenize,
)
from kvroute.sim.rank_server import FirstToken, Prompt, RankServer, Ticket, output_tokens

if TYPE_CHECKING:
    from kvroute.sim.engine import SimulatedEngine

DP_RANK_HEADER = "x-data-parallel-rank"
BodyT = TypeVar("BodyT", bound=BaseModel)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def engine_app(engine: "SimulatedEngine") -> Starlette:
    """The application; state is the engine's."""

    async def completions(request: Request) -> Response:
        body = await _read(request, CompletionBody)
        try:
            tokens = prompt_tokens(body.prompt)
        except ValueError as error:
            raise _RefusedError(400, str(error)) from error
        return await generate(request, body, tokens, body.max_tokens, chat=False)

    async def chat_completions(request: Request) -> Response:
        body = await _read(request, ChatBody)
        tokens = tokenize(chat_prompt(body.messages))
        return await generate(request, body, tokens, body.max_completion_tokens or body.max_tokens, chat=True)

    async def generate(
        request: Request, body: CompletionBody | ChatBody, tokens: list[int], limit: int, *, chat: bool
    ) -> Response:
        if body.model not in (None, engine.settings.model):
            raise _RefusedError(404, f"The model `{body.model}` does not exist.")
        server = _rank(engine.ranks, request)
        try:
            ticket = server.submit(Prompt(tokens, limit, body.cache_salt))
        except ValueError as error:
            raise _RefusedError(400, str(error)) from error
        answer = _Answer(engine.settings.model, len(tokens), limit, chat)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            delay = server.speed.per_output_token
            return StreamingResponse(answer.stream(ticket, delay, with_usage), media_type="text/event-stream")
        first = await ticket.first_token
        return JSONResponse(answer.whole(await ticket.output, first))

    async def tokenize_prompt(request: Request) -> Response:
        body = await _read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise _RefusedError(400, "one of prompt and messages must be given")
        tokens = tokenize(chat_prompt(body.messages) if body.messages is not None else body.prompt or "")
        limit = engine.settings.rank.npu_blocks * engine.settings.rank.block_size
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def models(_: Request) -> Response:
        model = {"id": engine.settings.model, "object": "model", "created": 0, "owned_by": "vllm"}
        return JSONResponse({"object": "list", "data": [model]})

    async def event_sources(_: Request) -> Response:
        return JSONResponse(
            [
                {
                    "dp_rank": server.dp_rank,
                    "endpoint": server.publisher.endpoint,
                    "replay_endpoint": server.publisher.replay_endpoint,
                    "topic": server.publisher.topic.decode(),
                }
                for server in engine.ranks
            ]
        )

    async def reset_prefix_cache(_: Request) -> Response:
        done = [server.rank.reset_prefix_cache() for server in engine.ranks]
        return Response(status_code=200 if all(done) else 409)

    async def true_cache(request: Request) -> Response:
        rank = _rank(engine.ranks, request).rank
        return JSONResponse(rank.true_cache.report(rank.pool.cached_hashes))

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def metrics(_: Request) -> Response:
        text = engine.metrics.render(engine.ranks)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def refused(_: Request, error: Exception) -> Response:
        status, message = (error.status, error.message) if isinstance(error, _RefusedError) else (500, str(error))
        kind = "NotFoundError" if status == 404 else "BadRequestError" if status < 500 else "InternalServerError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/tokenize", tokenize_prompt, methods=["POST"]),
            Route("/kv_event_sources", event_sources),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/sim/cache", true_cache),
            Route("/health", health),
            Route("/ping", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={_RefusedError: refused},
    )


async def _read(request: Request, model: type[BodyT]) -> BodyT:
    try:
        return model.model_validate(orjson.loads(await request.body()))
    except orjson.JSONDecodeError as error:
        raise _RefusedError(400, f"the body is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise _RefusedError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _rank(ranks: list[RankServer], request: Request) -> RankServer:
    """The rank a header steers to, else the least loaded one."""
    wanted = request.headers.get(DP_RANK_HEADER)
    if wanted is None:
        return min(ranks, key=lambda server: server.load)
    if not wanted.isdecimal() or int(wanted) >= len(ranks):
        raise _RefusedError(400, f"{DP_RANK_HEADER} must be below {len(ranks)}, got {wanted!r}")
    return ranks[int(wanted)]


class _Answer:
    """Shapes of one answer, whole or in chunks, for completions and chat."""

    def __init__(self, model: str, prompt_length: int, limit: int, chat: bool) -> None:
        kind = "chat.completion" if chat else "text_completion"
        self._chat = chat
        self._chunk_kind = f"{kind}.chunk" if chat else kind
        self._base = {"created": int(time.time()), "model": model}
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._kind = kind
        self._lengths = (prompt_length, limit)

    def whole(self, output: list[int], first: FirstToken) -> dict[str, Any]:
        text = detokenize(output)
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
        return self._body(self._kind, [choice]) | self._usage(first)

    async def stream(self, ticket: Ticket, delay: float, with_usage: bool) -> AsyncIterator[bytes]:
        first = await ticket.first_token
        output = output_tokens(ticket.prompt)
        for position, token in enumerate(output):
            if position:
                await asyncio.sleep(delay)
            yield self._chunk(detokenize([token]), "length" if position == len(output) - 1 else None)
        await ticket.output
        if with_usage:
            yield _event(self._body(self._chunk_kind, []) | self._usage(first))
        yield b"data: [DONE]\n\n"

    def _chunk(self, text: str, finish_reason: str | None) -> bytes:
        content = {"delta": {"content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return _event(self._body(self._chunk_kind, [choice]))

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._base, "choices": choices}

    def _usage(self, first: FirstToken) -> dict[str, Any]:
        """The usage as vLLM reports it, and beside it where the cached blocks came from (a simulation knows)."""
        prompt_length, limit = self._lengths
        return {
            "usage": {
                "prompt_tokens": prompt_length,
                "completion_tokens": limit,
                "total_tokens": prompt_length + limit,
                "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
            },
            "kv_hits": {
                "npu_blocks": first.npu_blocks,
                "cpu_blocks": first.cpu_blocks,
                "disk_blocks": first.disk_blocks,
            },
        }


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
