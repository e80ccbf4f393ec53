"""Runs the same load round robin and cache-aware, with empty caches each time, and says which was better."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx

from kvroute.demo.cluster import ClusterClient
from kvroute.demo.load import Gateway, Placer, run_load
from kvroute.demo.results import Served, Summary, summarise
from kvroute.demo.view import View
from kvroute.demo.workload import Conversation

HOLDINGS_SECONDS = 0.5


@dataclass(frozen=True)
class Comparison:
    """Both summaries, and what was served cache-aware."""

    round_robin: Summary
    cache_aware: Summary
    served_cache_aware: Sequence[Served]


async def compare(client: ClusterClient, gateway: Gateway, load: Sequence[Conversation], view: View) -> Comparison:
    """Expects a warm, empty cluster; leaves it full of what the cache-aware run brought."""
    robin = await _run("round robin", client, gateway, load, gateway.place_round_robin, view)
    await client.reset()
    aware = await _run("cache-aware", client, gateway, load, gateway.place_cache_aware, view)
    return Comparison(summarise(robin), summarise(aware), aware)


async def _run(
    name: str,
    client: ClusterClient,
    gateway: Gateway,
    load: Sequence[Conversation],
    place: Placer,
    view: View,
) -> list[Served]:
    view.phase(name, client.cluster.workers, sum(len(conversation.turns) for conversation in load))
    async with _holdings_shown(client, view):
        return await run_load(gateway, load, place, view)


@contextlib.asynccontextmanager
async def _holdings_shown(client: ClusterClient, view: View) -> AsyncIterator[None]:
    """Keep the view's picture of what lies where current."""

    async def follow() -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                view.holdings(await client.holdings())
            await asyncio.sleep(HOLDINGS_SECONDS)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
