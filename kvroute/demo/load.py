"""Sends a load of conversations, every turn to the worker a policy names, and measures what clients would feel."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import orjson

from kvroute.demo.cluster import Cluster
from kvroute.demo.placement import Match, Worker, most_saved_time, read_matches, round_robin
from kvroute.demo.results import Served
from kvroute.demo.view import View
from kvroute.demo.workload import Conversation, Turn
from kvroute.sim.engine_http import DP_RANK_HEADER
from kvroute.sim.rank_server import Prompt

Placement = tuple[Worker, Match | None]
Placer = Callable[[Prompt], Awaitable[Placement]]
STREAM_PREFIX = "data: "


class Gateway:
    """What a gateway in front of the engines has: its clients, the router, and how much it has sent where.

    Raises httpx.HTTPError when a service is away.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.workers = cluster.workers
        self.backlog: Counter[Worker] = Counter()
        self._cluster = cluster
        self._http = httpx.AsyncClient(timeout=60.0, trust_env=False, limits=httpx.Limits(max_connections=None))
        self._turns = itertools.count()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def matches(self, tokens: Sequence[int]) -> dict[Worker, Match]:
        """What every worker can reuse of a prompt, from the router."""
        body = {"model": self._cluster.model, "block_size": self._cluster.block_size, "token_ids": list(tokens)}
        response = await self._http.post(f"{self._cluster.router_url}/query", content=orjson.dumps(body), headers=_JSON)
        response.raise_for_status()
        return read_matches(orjson.loads(response.content))

    async def place_cache_aware(self, prompt: Prompt) -> Placement:
        """Ask the router, then weigh hits against queues."""
        matches = await self.matches(prompt.tokens)
        worker = most_saved_time(self.workers, matches, self.backlog)
        return worker, matches.get(worker, Match())

    async def place_round_robin(self, _: Prompt) -> Placement:
        """The next worker, whatever it holds."""
        return round_robin(self.workers, next(self._turns)), None

    async def send(self, worker: Worker, prompt: Prompt) -> tuple[float, dict[str, Any]]:
        """Have a prompt answered: the time.monotonic() of its first token, and the last chunk (usage, kv_hits)."""
        body = {
            "model": self._cluster.model,
            "prompt": list(prompt.tokens),
            "max_tokens": prompt.output_limit,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = _JSON | {DP_RANK_HEADER: str(worker.dp_rank)}
        url = f"{self._cluster.engines[worker.instance_id]}/v1/completions"
        first_token_at = 0.0
        last = ""
        async with self._http.stream("POST", url, content=orjson.dumps(body), headers=headers) as response:
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith(STREAM_PREFIX) and not line.endswith("[DONE]"):
                    first_token_at = first_token_at or time.monotonic()
                    last = line
        chunk: dict[str, Any] = orjson.loads(last.removeprefix(STREAM_PREFIX))
        return first_token_at, chunk

    async def serve(self, turn: Turn, place: Placer, view: View) -> Served:
        """Place one turn, have it answered, and tell what happened."""
        prompt = turn.prompt
        started = time.monotonic()
        worker, match = await place(prompt)
        usable = (len(prompt.tokens) - 1) // self._cluster.block_size * self._cluster.block_size
        promised = None if match is None else min(match.matched_tokens, usable)
        owed = len(prompt.tokens) - (promised or 0)
        self.backlog[worker] += owed
        view.sent(worker)
        try:
            first_token_at, chunk = await self.send(worker, prompt)
        finally:
            self.backlog[worker] -= owed
        served = Served(
            conversation=turn.conversation,
            turn=turn.number,
            worker=worker,
            prompt_tokens=len(prompt.tokens),
            cached_tokens=chunk["usage"]["prompt_tokens_details"]["cached_tokens"],
            **chunk["kv_hits"],
            seconds=first_token_at - started,
            promised_tokens=promised,
        )
        view.served(served)
        return served


async def run_load(gateway: Gateway, load: Sequence[Conversation], place: Placer, view: View) -> list[Served]:
    """All conversations side by side, each turn after the answer to the one before. Raises what any of them raises."""

    async def converse(conversation: Conversation) -> list[Served]:
        await asyncio.sleep(conversation.start_seconds)
        answers = []
        for turn in conversation.turns:
            await asyncio.sleep(turn.think_seconds)
            answers.append(await gateway.serve(turn, place, view))
        return answers

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(converse(conversation)) for conversation in load]
    return [served for task in tasks for served in task.result()]


_JSON = {"content-type": "application/json"}
