"""``kvroute audit``: what the index promises against what engines have."""

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvroute.audit.comparison import Finding
from kvroute.audit.run import AuditError, audit

DEFAULT_ROUTER_URL = "http://127.0.0.1:13333"
EXIT_DRIFT = 1
EXIT_FAILED = 2


def audit_index(
    router_url: Annotated[str, typer.Option("--router", help="Router to audit.")] = DEFAULT_ROUTER_URL,
    max_drift: Annotated[
        float, typer.Option(min=0, max=1, help="Exit code 1 when false hits or misses exceed this share.")
    ] = 0.05,
    settle: Annotated[
        float, typer.Option(min=0, help="Seconds until a rank that differs is looked at once more.")
    ] = 1.0,
    as_json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per engine rank.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colours, also on a terminal.")] = False,
) -> None:
    """Compare the index with engines: block by block where an engine tells what it holds (simulated ones do), and by
    what responses reported to POST /v1/feedback elsewhere."""
    try:
        findings = asyncio.run(audit(router_url.rstrip("/"), settle))
    except AuditError as error:
        typer.echo(f"kvroute audit: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    if as_json_lines:
        for finding in findings:
            typer.echo(json.dumps(finding.as_dict()))
    else:
        console = Console(color_system=None if plain else "auto", width=None if not plain else 160)
        console.print(_table(findings, max_drift))
    if any(finding.worst_rate > max_drift for finding in findings):
        raise typer.Exit(EXIT_DRIFT)


def _table(findings: list[Finding], max_drift: float) -> Table:
    table = Table(title=f"{len(findings)} engine ranks")
    for column in ("instance", "rank", "stream", "measured by"):
        table.add_column(column)
    for column in ("index blocks", "engine blocks", "false hits", "false misses"):
        table.add_column(column, justify="right")
    for one in findings:
        style = "red" if one.worst_rate > max_drift else None
        table.add_row(
            one.instance_id,
            str(one.dp_rank),
            one.state,
            f"{one.responses} responses" if one.measured_by == "feedback" else one.measured_by,
            str(one.index_blocks),
            "?" if one.engine_blocks is None else str(one.engine_blocks),
            _share(one.false_hits, one.false_hit_rate),
            _share(one.false_misses, one.false_miss_rate),
            style=style,
        )
    return table


def _share(blocks: int | None, rate: float | None) -> str:
    if rate is None:
        return "?"
    return f"{rate:.1%}" if blocks is None else f"{blocks} ({rate:.1%})"
