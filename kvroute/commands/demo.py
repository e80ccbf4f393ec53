"""``kvroute demo``: simulated engines under load, cache-aware against round robin."""

import asyncio
import signal
import sys
from typing import Annotated

import httpx
import typer
from rich.console import Console

from kvroute.demo.cluster import ClusterError
from kvroute.demo.run import run_demo
from kvroute.demo.view import View
from kvroute.embedded import StackError
from services.runtime.config import ConfigError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop after the table instead of serving on.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live page.")] = False,
) -> None:
    """Run everything with three simulated engines and a pool under a chat load, and compare with round robin.

    Exits with 0 when cache-aware placement was ahead in every figure of the table, else with 1.
    """
    console = Console(soft_wrap=True, highlight=False, force_terminal=False if plain else None)
    sys.exit(asyncio.run(_run(console, once)))


async def _run(console: Console, once: bool) -> int:
    work = asyncio.create_task(run_demo(View(console), once=once), name="demo")
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
