"""A simulated engine that may misbehave, behind a whole stack: what it holds beside what the index says it holds."""

import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx

from kvroute.embedded import EmbeddedStack
from kvroute.sim.engine import EngineSettings, SimulatedEngine
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.fault_names import parse_fault
from kvroute.sim.rank_server import Prompt
from kvroute.sim.registration import register
from kvroute.sim.timing import Speed
from tests.e2e.support import unique

BLOCK = 4
DEADLINE = 30.0
FAST = Speed(prefill=10_000_000.0, overhead=0.0, per_output_token=0.0)


class Subject:
    """An engine under test on a shared stack. ``prompts`` are all that it was ever asked."""

    def __init__(self, stack: EmbeddedStack, *faults: str, **spec: Any) -> None:
        self.name = unique("engine")
        self.stack = stack
        self.model = unique("model")
        self.prompts: list[list[int]] = []
        self.chance = random.Random(7)
        rank = RankSpec(BLOCK, spec.pop("npu_blocks", 64), spec.pop("own_cpu_blocks", 0))
        settings = EngineSettings(
            self.name, self.model, rank, speed=FAST, faults=tuple(map(parse_fault, faults)), **spec
        )
        self.engine = SimulatedEngine(settings)
        self.router = httpx.AsyncClient(base_url=stack.router_url, timeout=10.0, trust_env=False)
        self.ingest = httpx.AsyncClient(base_url=stack.addresses.url("ingest"), timeout=10.0, trust_env=False)

    async def __aenter__(self) -> "Subject":
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for body in self.engine.registrations():
            await self.router.post("/unregister", json=body)
        await self.router.aclose()
        await self.ingest.aclose()
        await self.engine.stop()

    async def register(self, **changes: Any) -> None:
        """Make the engine known and wait until it is listened to."""
        bodies = [body | changes for body in self.engine.registrations()]
        await register(self.stack.router_url, bodies, lambda _: None)
        await asyncio.gather(*(asyncio.wait_for(rank.publisher.subscribed(), 10) for rank in self.engine.ranks))

    async def ask(self, count: int, *, dp_rank: int = 0, shared: Sequence[int] = ()) -> None:
        """Serve prompts, half of which go on where an earlier one ended."""
        for _ in range(count):
            begin = list(shared)
            if not begin and self.prompts and self.chance.random() < 0.5:
                begin = self.chance.choice(self.prompts)[: 2 * BLOCK]
            new = self.chance.randrange(1, 6) * BLOCK + 1
            prompt = begin + [self.chance.randrange(1000) for _ in range(new)]
            self.prompts.append(prompt)
            ticket = self.engine.ranks[dp_rank].submit(Prompt(prompt, 1))
            await ticket.first_token
            await ticket.output
            await asyncio.sleep(0.002)
        await self.idle()

    async def idle(self) -> None:
        """Wait until nothing runs (and a fault that waits for that has happened)."""
        while any(server.load or server._decoding for server in self.engine.ranks):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def status(self, dp_rank: int = 0) -> dict[str, Any]:
        """What ingest says of the engine's stream."""
        publishers = (await self.ingest.get("/publishers")).json()["publishers"]
        own = [one for one in publishers if (one["instance_id"], one["dp_rank"]) == (self.name, dp_rank)]
        return dict(own[0]) if own else {"state": "none", "coverage": 0.0}

    async def differences(self, dp_rank: int = 0) -> tuple[int, int]:
        """Blocks that the index promises and the engine does not have, and the reverse: (false, missing)."""
        false = missing = 0
        for prompt in self.prompts:
            body = {"model": self.model, "block_size": BLOCK, "token_ids": prompt}
            answer = (await self.router.post("/query", json=body)).json().get("default", {})
            entry = answer.get(self.name, {"DP": {}})["DP"].get(str(dp_rank), {"npu_blocks": 0, "cpu_blocks": 0})
            rank = self.engine.ranks[dp_rank].rank
            hashes = rank.hash_prompt(prompt, None, None)
            npu = rank.npu_prefix(hashes)
            cpu = rank.own_cpu.prefix(hashes[npu:]) if rank.own_cpu else 0
            promised = entry["npu_blocks"] + entry["cpu_blocks"]
            false += max(0, promised - npu - cpu)
            missing += max(0, npu + cpu - promised)
        return false, missing

    async def settle(
        self, *states: str, dp_rank: int = 0, seconds: float = DEADLINE, equal: bool = False
    ) -> tuple[str, int, int, float]:
        """Wait for one of the states, and for `live` (or equal) until index and engine agree: (state, false, missing,
        seconds)."""
        began = time.monotonic()
        while True:
            state = (await self.status(dp_rank))["state"]
            false, missing = await self.differences(dp_rank)
            took = time.monotonic() - began
            if state in states and ((state != "live" and not equal) or (false, missing) == (0, 0)):
                return state, false, missing, took
            assert took < seconds, f"{state}, {false} false, {missing} missing: {await self.status(dp_rank)}"
            await asyncio.sleep(0.02)


def measured(name: str, seconds: float) -> None:
    """Note how long it took, where STREAM_FAULTS_MEASURED names a file."""
    if path := os.environ.get("STREAM_FAULTS_MEASURED"):
        with open(path, "a") as file:
            file.write(json.dumps({"fault": name, "seconds": round(seconds, 2)}) + "\n")
