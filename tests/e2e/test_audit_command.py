"""`kvroute audit` against the whole stack and simulated engines: agreement, drift in both directions, feedback."""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.audit.run import AuditError, audit
from kvroute.embedded import EmbeddedStack
from kvroute.sim.engine import EngineSettings, SimulatedEngine
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.registration import register, unregister
from kvroute.sim.timing import Speed
from tests.e2e.support import unique

FAST = Speed(prefill=1e9, overhead=0.0, per_output_token=0.0)
BLOCK = 4


@pytest.fixture
async def engine(stack: EmbeddedStack) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(EngineSettings(unique("audited"), unique("model"), RankSpec(BLOCK, 40), 2, speed=FAST))
    await engine.start()
    await register(stack.router_url, engine.registrations(), lambda _: None)
    await asyncio.gather(*(server.publisher.subscribed() for server in engine.ranks))
    yield engine
    await unregister(stack.router_url, engine.registrations())
    await engine.stop()


async def findings(stack: EmbeddedStack, engine: SimulatedEngine) -> dict[int, Any]:
    found = await audit(stack.router_url, 0.5)
    return {one.dp_rank: one for one in found if one.instance_id == engine.settings.name}


async def command(stack: EmbeddedStack, *options: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "audit", "--router", stack.router_url, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, error = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, (output + error).decode()


async def test_the_index_of_a_busy_engine_agrees_with_its_cache_and_drift_is_found(
    stack: EmbeddedStack, engine: SimulatedEngine
) -> None:
    chance = random.Random(3)
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        for number in range(60):
            prompt = [chance.randrange(2) for _ in range(chance.randrange(4, 40))]
            body = {"model": engine.settings.model, "prompt": prompt, "max_tokens": 2}
            headers = {"X-data-parallel-rank": str(number % 2)}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    give_up = time.monotonic() + 15
    while any(one.worst_rate for one in (await findings(stack, engine)).values()):
        assert time.monotonic() < give_up, await findings(stack, engine)
    found = await findings(stack, engine)
    assert [found[rank].measured_by for rank in (0, 1)] == ["cache", "cache"]
    assert found[0].engine_blocks == engine.ranks[0].rank.pool.cached_blocks > 0
    async with httpx.AsyncClient(base_url=stack.router_url, trust_env=False) as client:
        ghost = {"event_id": 1, "event_type": "stored", "dp_rank": 0, "block_hashes": [900_001, 900_002]}
        ghost |= {"token_ids": list(range(5000, 5000 + 2 * BLOCK)), "block_size": BLOCK}
        cleared = {"event_id": 2, "event_type": "AllBlocksCleared", "dp_rank": 1}
        body = {"instance_id": engine.settings.name, "events": [ghost, cleared]}
        assert (await client.post("/events", json=body)).status_code == 200
    found = await findings(stack, engine)
    assert (found[0].false_hits, found[0].false_misses) == (2, 0)
    assert found[1].false_hits == 0
    assert found[1].false_misses == found[1].engine_blocks
    code, output = await command(stack, "--json", "--settle", "0")
    assert code == 1
    (line,) = [
        one
        for one in map(json.loads, output.splitlines())
        if (one["instance_id"], one["dp_rank"]) == (engine.settings.name, 1)
    ]
    assert line["false_miss_rate"] == 1.0
    code, output = await command(stack, "--plain", "--max-drift", "1")
    assert code == 0
    assert engine.settings.name in output


async def test_feedback_of_responses_shows_in_workers_and_metrics(
    stack: EmbeddedStack, engine: SimulatedEngine
) -> None:
    name = engine.settings.name
    async with httpx.AsyncClient(base_url=stack.router_url, trust_env=False) as client:
        body = {"instance_id": name, "promised_tokens": 8, "cached_tokens": 4, "prompt_tokens": 20}
        assert (await client.post("/v1/feedback", json=body)).json() == {"status": "ok", "taken": 1, "unknown": 0}
        workers = (await client.get("/workers")).json()["workers"]
        (worker,) = [worker for worker in workers if worker["instance_id"] == name]
        assert worker["endpoints"]["0"]["feedback"] == {
            "responses": 1,
            "false_hit_rate": 0.5,
            "false_miss_rate": 0.0,
        }
        text = (await client.get("/metrics")).text
        assert f'kvroute_router_false_hit_rate{{dp_rank="0",instance_id="{name}"}} 0.5' in text
        answer = await client.post("/v1/feedback", json={"instance_id": name, "cached_tokens": "x"})
        assert (answer.status_code, "cached_tokens" in answer.json()["error"]) == (400, True)


async def test_a_router_that_is_not_there_is_said() -> None:
    with pytest.raises(AuditError, match=r"127\.0\.0\.1:9"):
        await audit("http://127.0.0.1:9", 0)
