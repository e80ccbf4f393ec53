"""``kvroute tap``: the steps of the state machine, decoded, as they happen."""

import asyncio
import signal
from contextlib import aclosing
from typing import Annotated

import nats.errors
import typer
from rich.console import Console

from kvroute.taps.follow import connect, state_notes
from kvroute.taps.state_lines import as_json, as_text
from schemas.events import STATES, BodyError
from services.runtime.logging import masked
from services.runtime.settings import NATS_SCHEMES, names_a_server

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"


def tap(
    state: Annotated[
        list[str] | None, typer.Option(help=f"Only this state (may be repeated): {', '.join(STATES)}.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    nats_url: Annotated[str, typer.Option(help="NATS server.", envvar="KVROUTE_NATS__URL")] = DEFAULT_NATS_URL,
    as_json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colours, also on a terminal.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many notes.")] = None,
) -> None:
    """Print what becomes of every event: received, queued, matched, dropped ... (NATS subjects kv.state.>)."""
    states = state or []
    unknown = [name for name in states if name not in STATES]
    if unknown:
        raise typer.BadParameter(f"unknown state {unknown[0]!r}; one of {', '.join(STATES)}", param_hint="--state")
    for url in nats_url.split(","):
        if not names_a_server(url.strip() if "://" in url else f"nats://{url.strip()}", NATS_SCHEMES):
            problem = f"{masked(url)} is not a NATS server; write nats://host:4222"
            raise typer.BadParameter(problem, param_hint="--nats-url")
    console = Console(color_system=None if plain or as_json_lines else "auto", soft_wrap=True, highlight=False)
    try:
        asyncio.run(_print_notes(console, states, model, nats_url, as_json_lines, count))
    except (OSError, nats.errors.Error) as error:
        typer.echo(f"kvroute tap: cannot follow {masked(nats_url)}: {error or type(error).__name__}", err=True)
        raise typer.Exit(1) from None


async def _print_notes(
    console: Console, states: list[str], model: str | None, nats_url: str, as_json_lines: bool, count: int | None
) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    client = await connect(nats_url)
    if console.is_terminal:
        typer.echo(f"listening at {masked(nats_url)} for what happens from now on; Ctrl-C ends", err=True)
    printed = 0
    try:
        async with aclosing(state_notes(client, states, model)) as notes:
            async for note in notes:
                if isinstance(note, BodyError):
                    typer.echo(f"not a state note: {note}", err=True)
                    continue
                console.print(as_json(note) if as_json_lines else as_text(note), markup=False)
                printed += 1
                if printed == count:
                    return
    except asyncio.CancelledError:
        return
    finally:
        await client.close()
