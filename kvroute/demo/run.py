"""The demo from start to end: stack, cluster, both policies, the table, and what to try afterwards."""

import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from kvroute.demo.cluster import Cluster, ClusterClient, wait_until
from kvroute.demo.comparison import Comparison, compare
from kvroute.demo.load import Gateway
from kvroute.demo.results import comparison_table, is_ahead, kept_promises
from kvroute.demo.simulated_cluster import simulated_cluster
from kvroute.demo.view import View
from kvroute.demo.workload import Conversation, Shape, conversations
from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.rank_server import Prompt

WARM_UP_SECONDS = 20.0
VISIBLE_SECONDS = 10.0
REACHABLE_SECONDS = 90.0
EXAMPLE_TOKENS = list(range(1, 98))
EXIT_AHEAD = 0
EXIT_NOT_AHEAD = 1


async def run_demo(view: View, *, once: bool, shape: Shape | None = None) -> int:
    """Run everything; unless ``once``, keep serving until cancelled. The exit code: 0 when cache-aware was ahead.

    Raises StackError, ConfigError, ClusterError, OSError, httpx.HTTPError.
    """
    began = time.monotonic()
    load = conversations(shape or Shape())
    view.note("starting NATS, Redis and the services ...")
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(EmbeddedStack(StackOptions(), say=view.note))
        cluster = await cleanup.enter_async_context(simulated_cluster(stack.router_url))
        view.note(f"registered {len(cluster.engines)} simulated engines with {cluster.dp_size} DP ranks and a pool")
        client = ClusterClient(cluster)
        cleanup.push_async_callback(client.close)
        gateway = Gateway(cluster)
        cleanup.push_async_callback(gateway.close)
        await client.warm_up(WARM_UP_SECONDS)
        view.note(f"up after {time.monotonic() - began:.0f} s")
        comparison = await _compare(client, gateway, load, view)
        if not once:
            await show_example(gateway)
            for line in curl_lines(cluster, stack.inference_url):
                view.note(line)
            view.note("\nserving until Ctrl-C ...")
            await stack.wait_failed()
        view.note("stopping ...")
    return EXIT_AHEAD if is_ahead(comparison.cache_aware, comparison.round_robin) else EXIT_NOT_AHEAD


async def run_load(view: View, cluster: Cluster, shape: Shape | None = None) -> int:
    """Put the demo's load on a cluster that runs elsewhere, once; the exit code as of run_demo.

    Raises ClusterError, httpx.HTTPError.
    """
    async with AsyncExitStack() as cleanup:
        client = ClusterClient(cluster)
        cleanup.push_async_callback(client.close)
        gateway = Gateway(cluster)
        cleanup.push_async_callback(gateway.close)
        view.note(f"waiting for {cluster.router_url} and {len(cluster.engines)} engines ...")
        await client.wait_until_reachable(REACHABLE_SECONDS)
        await client.warm_up(REACHABLE_SECONDS)
        comparison = await _compare(client, gateway, conversations(shape or Shape()), view)
    return EXIT_AHEAD if is_ahead(comparison.cache_aware, comparison.round_robin) else EXIT_NOT_AHEAD


async def _compare(client: ClusterClient, gateway: Gateway, load: Sequence[Conversation], view: View) -> Comparison:
    with view:
        comparison = await compare(client, gateway, load, view)
    view.console.print(comparison_table(comparison.cache_aware, comparison.round_robin))
    kept, asked = kept_promises(comparison.served_cache_aware)
    view.note(f"of {asked} requests, the engine had exactly the prefix that the router had promised in {kept}")
    if not is_ahead(comparison.cache_aware, comparison.round_robin):
        view.note("cache-aware placement was not ahead in every figure")
    return comparison


async def show_example(gateway: Gateway) -> None:
    """Have the prompt of the printed /query served, and wait until the router knows its blocks."""
    worker = gateway.workers[0]
    await gateway.send(worker, Prompt(EXAMPLE_TOKENS))

    async def visible() -> bool:
        matches = await gateway.matches(EXAMPLE_TOKENS)
        return worker in matches and matches[worker].npu_blocks > 0

    await wait_until(visible, VISIBLE_SECONDS, "the example prompt's blocks")


def curl_lines(cluster: Cluster, inference_url: str) -> list[str]:
    """Three calls to try, each in one line."""
    query = {"model": cluster.model, "block_size": cluster.block_size, "token_ids": EXAMPLE_TOKENS}
    completion = {"model": cluster.model, "prompt": "Where is my prefix cached?", "max_tokens": 16}
    return [
        "\ntry:",
        _curl(f"{cluster.router_url}/query", query),
        _curl(f"{cluster.router_url}/workers"),
        _curl(f"{inference_url}/v1/completions", completion),
    ]


def _curl(url: str, body: dict[str, object] | None = None) -> str:
    if body is None:
        return f"curl -s {url}"
    return f"curl -s {url} -H 'content-type: application/json' -d '{json.dumps(body, separators=(',', ':'))}'"
