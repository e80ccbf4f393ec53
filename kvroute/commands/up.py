"""``kvroute up``: the whole stack on this host, for people's own engines."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvroute.embedded import EmbeddedStack, StackError, StackOptions
from kvroute.embedded.up_page import lines_when_up
from services.runtime.config import ConfigError

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2


def up(
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="kvroute.yaml; default: $KVROUTE_CONFIG.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where NATS and Redis keep their files; default: a folder removed at the end.")
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(help="A NATS server with JetStream that runs already, instead of one started here.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="A Redis server that runs already, instead of one started here.")
    ] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until everything has to be ready.")] = 60.0,
) -> None:
    """Run NATS, Redis and the four services on this host until Ctrl-C; occupied ports are replaced by free ones."""
    console = Console(soft_wrap=True, highlight=False)
    environment = {}
    if console.is_terminal and "KVROUTE_LOGGING__FORMAT" not in os.environ:
        environment["KVROUTE_LOGGING__FORMAT"] = "console"
    options = StackOptions(
        config_file=config,
        data_dir=data_dir,
        nats_url=nats_url,
        redis_url=redis_url,
        environment=environment,
        start_timeout=start_timeout,
    )
    sys.exit(asyncio.run(run_until_told_to_stop(options, console)))


async def run_until_told_to_stop(options: StackOptions, console: Console) -> int:
    """Run a stack until SIGINT, SIGTERM or SIGHUP; a second one stops it at once. The exit code."""

    def say(text: str) -> None:
        console.print(text, style="bold", markup=False)

    def on_line(name: str, line: str) -> None:
        console.print(Text.assemble((f"{name:<11} | ", "cyan"), line))

    stack = EmbeddedStack(options, say, on_line)
    work = asyncio.create_task(_run(stack, say), name="stack")
    told = False

    def stop() -> None:
        nonlocal told
        if told or stack.stopping:
            stack.kill()
            return
        told = True
        say("stopping; once more stops at once")
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await work
    except asyncio.CancelledError:
        say("stopped")
        return 0
    except ConfigError as error:
        say(f"kvroute up: {error}")
        return EXIT_CONFIGURATION
    except StackError as error:
        say(f"kvroute up: {error}")
        return EXIT_FAILED
    return 0


async def _run(stack: EmbeddedStack, say: Callable[[str], None]) -> None:
    async with stack:
        say("\n".join(lines_when_up(stack)))
        await stack.wait_failed()
