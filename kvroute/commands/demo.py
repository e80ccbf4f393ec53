"""``kvroute demo``: simulated engines under load, cache-aware against round robin."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Annotated

import httpx
import typer
from rich.console import Console

from kvroute.demo.cluster import Cluster, ClusterError
from kvroute.demo.run import run_demo, run_load
from kvroute.demo.simulated_cluster import BLOCK_SIZE, DP_SIZE, MODEL
from kvroute.demo.view import View
from kvroute.embedded import StackError
from services.runtime.config import ConfigError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop after the table instead of serving on.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live page.")] = False,
    on: Annotated[str | None, typer.Option(help="Router of a running cluster: only put the load on it.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="With --on: NAME=URL of each simulated engine.")] = None,
    pool: Annotated[str | None, typer.Option(help="With --on: URL of the simulated MetaService.")] = None,
) -> None:
    """Run everything with three simulated engines and a pool under a chat load, and compare with round robin.

    Exits with 0 when cache-aware placement was ahead in every figure of the table, else with 1.
    """
    console = Console(soft_wrap=True, highlight=False, force_terminal=False if plain else None)
    work = run_demo(View(console), once=once) if on is None else run_load(View(console), _cluster(on, engine, pool))
    sys.exit(asyncio.run(_run(console, once, work)))


def _cluster(router_url: str, engines: list[str] | None, pool_url: str | None) -> Cluster:
    pairs = dict(text.partition("=")[::2] for text in engines or ())
    if not pairs or not all(url.startswith("http") for url in pairs.values()):
        raise typer.BadParameter("give every engine as NAME=http://HOST:PORT", param_hint="--engine")
    return Cluster(router_url.rstrip("/"), pairs, DP_SIZE, MODEL, BLOCK_SIZE, pool_url)


async def _run(console: Console, once: bool, running: Coroutine[None, None, int]) -> int:
    work = asyncio.create_task(running, name="demo")
    told = False

    def stop() -> None:
        nonlocal told
        if not told:
            told = True
            console.print("stopping ...")
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        return await work
    except asyncio.CancelledError:
        return 0 if not once else EXIT_INTERRUPTED
    except (StackError, ConfigError, ClusterError, OSError, ValueError, httpx.HTTPError) as error:
        console.print(f"kvroute demo: {error or type(error).__name__}", markup=False)
        return EXIT_FAILED
