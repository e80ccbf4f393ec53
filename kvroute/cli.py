"""The ``kvroute`` command. A command is a module of kvroute.commands and one line here."""

from typing import Annotated

import typer

from kvroute import __version__
from kvroute.commands import audit, config, demo, sim, simulate, tap, up

app = typer.Typer(
    name="kvroute",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Cache-aware request placement for LLM clusters that share a KV-cache pool.",
    epilog="`kvroute COMMAND --help` explains a command. The services also run one by one: python -m services.router "
    "(ingest, matcher, coordinator).",
)
app.command()(demo.demo)
app.command()(up.up)
app.command()(tap.tap)
app.command("simulate")(simulate.simulate_trace)
app.command("audit")(audit.audit_index)
app.add_typer(config.app, name="config")
app.add_typer(sim.app, name="sim")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvroute {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before the command; the help text is the one above."""


def main() -> None:
    """Entry point of the installed command."""
    app()
