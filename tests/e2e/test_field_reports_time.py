"""Faults reported from the field that need time: idle engines, a killed router, memory under ever new prefixes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from kvroute.embedded import EmbeddedStack, StackOptions
from tests.e2e.reported_site import BLOCK, Site, gpu_remove, gpu_store, tokens
from tests.e2e.support import Counts, Pipeline, Router, eventually

MIB = 1024 * 1024
# Everything that forgets by itself forgets at once here.
HASTY = {
    "KVROUTE_MATCHER__PENDING_TTL": "0.5",
    "KVROUTE_MATCHER__CONTENT_TTL": "0.5",
    "KVROUTE_MATCHER__OFFLOAD_TTL": "0.5",
    "KVROUTE_MATCHER__SWEEP_INTERVAL": "0.1",
    "KVROUTE_NATS__STREAM_STATE_TTL": "3",
    "KVROUTE_ROUTER__STALE_AFTER": "3",
}


@pytest.fixture
async def hasty() -> AsyncIterator[EmbeddedStack]:
    """A stack of its own whose patience is short."""
    async with EmbeddedStack(StackOptions(any_ports=True, environment=HASTY), lambda _: None) as stack:
        yield stack


@pytest.fixture
async def lone_site(hasty: EmbeddedStack) -> AsyncIterator[Site]:
    """A site on that stack."""
    router = Router(hasty.router_url)
    pipeline = await Pipeline.connect(hasty.nats_url, hasty.addresses.url("ingest"), hasty.router_url)
    site = Site(router, pipeline)
    yield site
    await site.close()
    await router.close()
    await pipeline.close()


async def test_po_09_and_po_10_idle_engines_keep_their_blocks_also_behind_a_killed_router(
    hasty: EmbeddedStack, lone_site: Site
) -> None:
    site = lone_site
    await site.engine("A")
    site.publish("A", gpu_store([11], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    await asyncio.sleep(5.0)  # ten times what the matcher remembers, more than a stale stream is tolerated
    assert await site.counts("A", tokens(1)) == Counts(npu=1, matched=BLOCK)
    os.kill(hasty.pids["router"], signal.SIGKILL)

    async def answered() -> Counts | int:
        try:
            ready = await site.router.http.get("/readyz")
            if ready.status_code != 200:
                assert ready.json()["conditions"]
                return ready.status_code
            return await site.counts("A", tokens(1))
        except httpx.HTTPError:
            return 0

    await eventually(answered, Counts(npu=1, matched=BLOCK))


async def resident(url: str) -> float:
    """Resident memory of a service in MiB, as its own metrics say."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{url}/metrics")).text
    (line,) = (line for line in text.splitlines() if line.startswith("process_resident_memory_bytes "))
    return float(line.split()[1]) / MIB


async def test_t38_ever_new_prefixes_leave_no_memory_behind(hasty: EmbeddedStack, lone_site: Site) -> None:
    """Each round: 20 000 blocks with a prefix and hashes never seen before, then all are removed."""
    site = lone_site
    await site.engine("A")
    urls = {name: hasty.addresses.url(name) for name in ("ingest", "matcher", "router")}
    chains, blocks = 500, 40
    after: list[dict[str, float]] = []
    for round_number in range(8):
        first = round_number * chains * blocks + 1
        starts = range(first, first + chains * blocks, blocks)
        for chain in range(0, chains, 20):
            stored = (
                gpu_store(range(start, start + blocks), tokens(blocks, first=start * BLOCK))
                for start in starts[chain : chain + 20]
            )
            site.publish("A", *stored)
        await site.settle()
        assert await site.router.held(site.name("A")) == (chains * blocks, 0, 0)
        for start in starts:
            site.publish("A", gpu_remove(*range(start, start + blocks)))
        await site.settle()
        assert await site.router.held(site.name("A")) == (0, 0, 0)
        after.append({name: await resident(url) for name, url in urls.items()})
    for name in urls:
        growth = after[-1][name] - after[2][name]
        assert growth < 12, f"{name} grew by {growth:.1f} MiB in five rounds: {[entry[name] for entry in after]}"
    indexer = (await site.router.http.get("/workers")).json()["indexer"]
    (space,) = [entry for entry in indexer if entry["model_name"] == site.model]
    assert (space["total_blocks"], space["memberships"], space["waiting_blocks"]) == (0, 0, 0)
