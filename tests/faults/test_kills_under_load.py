"""kill -9 of matcher, router, NATS and Redis under load: afterwards the index equals what the engines hold.

(What an engine publishes while ingest itself is down is not asked for again yet: docs/architecture.md, "Where it ends
today".)
"""

import asyncio
import os
import random
import signal
import time
from typing import Any

import httpx
import pytest
import zmq.asyncio

from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import GPU, BlockRemoved, BlockStored, EngineEvent, encode_batch

MODEL, BLOCK, BLOCKS = "m", 4, 2
BATCHES_PER_SECOND = 100
VICTIMS = (
    "matcher",
    "router",
    "nats",
    "redis",
    "matcher",
    "nats",
)
SECONDS_BETWEEN_KILLS = 3.0


class Engine:
    """Publishes stores and removals of random chains and remembers what it still holds."""

    def __init__(self, name: str, context: "zmq.asyncio.Context", chance: random.Random) -> None:
        self.name = name
        self.publisher = EventPublisher(context, "tcp://127.0.0.1:0")
        self.held: dict[int, list[int]] = {}
        self._chance = chance
        self._next = 1

    def act(self) -> None:
        """One batch: a new chain, or the removal of one."""
        event: EngineEvent
        if not self.held or self._chance.random() < 0.6:
            first, self._next = self._next, self._next + BLOCKS
            tokens = [self._chance.randrange(1000) for _ in range(BLOCKS * BLOCK)]
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
            del self.held[first]
            event = BlockRemoved(block_hashes=list(range(first, first + BLOCKS)), medium=GPU)
        self.publisher.publish(encode_batch(time.time(), [event], 0))

    def registration(self) -> dict[str, Any]:
        body = {"instance_id": self.name, "type": "vLLM", "modelname": MODEL, "block_size": BLOCK, "dp_rank": 0}
        return body | {"medium_endpoints": {"npu": self.publisher.endpoint}, "store_backend": "Memcache"}


async def held_by_the_index(http: httpx.AsyncClient) -> dict[str, int]:
    workers = (await http.get("/workers")).json()["workers"]
    return {worker["instance_id"]: worker["endpoints"]["0"]["npu_blocks"] for worker in workers}


@pytest.mark.timeout(180)
async def test_the_index_is_right_after_everything_but_ingest_was_killed_under_load() -> None:
    chance = random.Random(11)
    context = zmq.asyncio.Context()
    async with EmbeddedStack(StackOptions(any_ports=True), say=lambda _: None) as stack:
        engines = [Engine(name, context, chance) for name in ("one", "two")]
        await register(stack.router_url, [engine.registration() for engine in engines], lambda _: None)
        await asyncio.gather(*(engine.publisher.subscribed() for engine in engines))
        began, killed = time.monotonic(), 0
        while killed < len(VICTIMS) or time.monotonic() - began < SECONDS_BETWEEN_KILLS * (len(VICTIMS) + 1):
            for engine in engines:
                engine.act()
            await asyncio.sleep(len(engines) / BATCHES_PER_SECOND)
            if killed < len(VICTIMS) and time.monotonic() - began > SECONDS_BETWEEN_KILLS * (killed + 1):
                os.kill(stack.pids[VICTIMS[killed]], signal.SIGKILL)
                killed += 1
        expected = {engine.name: BLOCKS * len(engine.held) for engine in engines}
        async with httpx.AsyncClient(base_url=stack.router_url, timeout=10.0, trust_env=False) as http:
            deadline = time.monotonic() + 60
            found: dict[str, int] = {}
            while found != expected:
                assert time.monotonic() < deadline, f"index has {found}, engines hold {expected}"
                await asyncio.sleep(0.1)
                try:
                    found = await held_by_the_index(http)
                except httpx.HTTPError:
                    continue
            for engine in engines:
                for tokens in list(engine.held.values())[:100]:
                    answer = await http.post("/query", json={"model": MODEL, "block_size": BLOCK, "token_ids": tokens})
                    assert answer.json()["default"][engine.name]["longest_matched"] == BLOCKS * BLOCK
        for engine in engines:
            await engine.publisher.close()
    context.destroy(linger=0)
