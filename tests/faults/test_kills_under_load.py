"""kill -9 of every process, one at a time and in pairs, under load: no false block afterwards, none missing, and the
router kept answering.

FULL_FAULTS=1 runs every pair, with 300 batches per second and 60 s of load between singles and pairs.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import zmq.asyncio

from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import GPU, BlockRemoved, BlockStored, EngineEvent, encode_batch

MODEL, BLOCK, BLOCKS = "m", 4, 2
PROCESSES = ("ingest", "matcher", "router", "coordinator", "nats", "redis")
SINGLES = [(name,) for name in PROCESSES]
FULL = bool(os.environ.get("FULL_FAULTS"))
PAIRS = (
    list(itertools.combinations(PROCESSES, 2))
    if FULL
    else [("ingest", "nats"), ("ingest", "matcher"), ("matcher", "nats"), ("router", "redis"), ("router", "nats")]
)
BATCHES_PER_SECOND = 300 if FULL else 100
LOAD_SECONDS = 60.0 / len(PROCESSES) if FULL else 1.5
AGREE_SECONDS = 60.0
RESTART_SECONDS = 10.0
HELD_AT_MOST = 300
ENVIRONMENT = {"KVROUTE_ROUTER__SNAPSHOT_INTERVAL": "2", "KVROUTE_MATCHER__LEASE_TTL": "2"}


class Engine:
    """Publishes stores and removals of random chains and remembers what it still holds, and what it has removed."""

    def __init__(self, name: str, context: "zmq.asyncio.Context", chance: random.Random) -> None:
        self.name = name
        self.publisher = EventPublisher(context, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.held: dict[int, list[int]] = {}
        self.removed: list[list[int]] = []
        self._chance = chance
        self._next = 1

    def act(self) -> None:
        """One batch: a new chain, or the removal of one."""
        event: EngineEvent
        if not self.held or (len(self.held) < HELD_AT_MOST and self._chance.random() < 0.6):
            first, self._next = self._next, self._next + BLOCKS
            tokens = [self._chance.randrange(30_000) for _ in range(BLOCKS * BLOCK)]
            self.held[first] = tokens
            event = BlockStored(
                block_hashes=list(range(first, first + BLOCKS)),
                parent_block_hash=None,
                token_ids=tokens,
                block_size=BLOCK,
                lora_id=None,
                medium=GPU,
                lora_name=None,
            )
        else:
            first = self._chance.choice(list(self.held))
            self.removed.append(self.held.pop(first))
            event = BlockRemoved(block_hashes=list(range(first, first + BLOCKS)), medium=GPU)
        self.publisher.publish(encode_batch(time.time(), [event], 0))

    def registration(self) -> dict[str, Any]:
        body = {"instance_id": self.name, "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": 0}
        endpoints = {"npu": self.publisher.endpoint}
        replay = {"replay_endpoint": self.publisher.replay_endpoint}
        return body | replay | {"medium_endpoints": endpoints, "store_backend": "None"}


class Caller:
    """Asks the router all the time; it has to answer, except while it is itself being started again."""

    def __init__(self, router_url: str, engines: list[Engine]) -> None:
        self._http = httpx.AsyncClient(base_url=router_url, timeout=5.0, trust_env=False)
        self._engines = engines
        self.answered = 0
        self.labels: set[str] = set()
        self.unanswered: list[str] = []
        self.router_killed_at = -RESTART_SECONDS

    async def run(self) -> None:
        while True:
            tokens = next(iter(self._engines[0].held.values()), [1] * BLOCK)
            body = {"model": MODEL, "block_size": BLOCK, "token_ids": tokens}
            try:
                answer = await self._http.post("/query", json=body)
                problem = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as error:
                problem = type(error).__name__
            if problem:
                if time.monotonic() - self.router_killed_at > RESTART_SECONDS:
                    self.unanswered.append(problem)
            else:
                self.answered += 1
                self.labels.add(answer.headers["x-kvroute-index"])
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._http.aclose()


async def load(engines: list[Engine], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for engine in engines:
            engine.act()
        await asyncio.sleep(len(engines) / BATCHES_PER_SECOND)


async def endpoints(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    workers = (await http.get("/workers")).json()["workers"]
    return {worker["instance_id"]: worker["endpoints"]["0"] for worker in workers}


async def until_the_index_agrees(http: httpx.AsyncClient, engines: list[Engine], what: str) -> None:
    """The number of blocks is that of every engine, and every stream says that it is live."""
    expected = {engine.name: (BLOCKS * len(engine.held), "live") for engine in engines}
    deadline = time.monotonic() + AGREE_SECONDS
    found: object = None
    while found != expected:
        assert time.monotonic() < deadline, f"after {what}: index has {found}, engines hold {expected}"
        await asyncio.sleep(0.1)
        try:
            ranks = await endpoints(http)
        except (httpx.HTTPError, KeyError):
            continue
        found = {name: (rank["npu_blocks"], rank["stream"]["state"]) for name, rank in ranks.items()}


async def matched(http: httpx.AsyncClient, engine: Engine, tokens: list[int]) -> int:
    answer = await http.post("/query", json={"model": MODEL, "block_size": BLOCK, "token_ids": tokens})
    return int(answer.json()["default"][engine.name]["longest_matched"])


@pytest.fixture
async def stack() -> AsyncIterator[EmbeddedStack]:
    async with EmbeddedStack(StackOptions(any_ports=True, environment=ENVIRONMENT), say=lambda _: None) as stack:
        yield stack


@pytest.mark.timeout(1800 if FULL else 240)
async def test_t09_the_index_is_right_after_every_process_was_killed_alone_and_in_pairs(stack: EmbeddedStack) -> None:
    chance = random.Random(11)
    context = zmq.asyncio.Context()
    engines = [Engine(name, context, chance) for name in ("one", "two")]
    await register(stack.router_url, [engine.registration() for engine in engines], lambda _: None)
    await asyncio.gather(*(engine.publisher.subscribed() for engine in engines))
    caller = Caller(stack.router_url, engines)
    calling = asyncio.create_task(caller.run())
    try:
        async with httpx.AsyncClient(base_url=stack.router_url, timeout=10.0, trust_env=False) as http:
            await load(engines, LOAD_SECONDS)
            await until_the_index_agrees(http, engines, "the start")
            for victims in [*SINGLES, *PAIRS]:
                loading = asyncio.create_task(load(engines, LOAD_SECONDS))
                await asyncio.sleep(LOAD_SECONDS / 3)
                for name in victims:
                    if name == "router":
                        caller.router_killed_at = time.monotonic()
                    os.kill(stack.pids[name], signal.SIGKILL)
                await loading
                await until_the_index_agrees(http, engines, " and ".join(victims))
                for engine in engines:
                    for tokens in list(engine.held.values())[-40:]:
                        assert await matched(http, engine, tokens) == BLOCKS * BLOCK, (victims, "missing")
                    for tokens in engine.removed[-40:]:
                        assert await matched(http, engine, tokens) == 0, (victims, "false")
        assert caller.unanswered == []
        assert caller.answered > 100
        assert "disconnected" in caller.labels, "without NATS the router answers from what it knew, and says so"
    finally:
        calling.cancel()
        await caller.close()
        for engine in engines:
            await engine.publisher.close()
        context.destroy(linger=0)
