"""``kvroute simulate``: what placement policies reach on a request trace."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvroute.simulate.run import Options, Outcome, simulate
from kvroute.simulate.trace import TraceError, read_trace
from services.router.placement.policies import DEFAULT_POLICY, POLICIES

EXIT_FAILED = 2


def simulate_trace(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake form, one JSON object a line.")],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="Engines.")] = 8,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(POLICIES)}; may be repeated to compare.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block of the trace.")] = 512,
    capacity: Annotated[int, typer.Option(min=1, help="Blocks an engine keeps.")] = 8000,
    rate: Annotated[float, typer.Option(min=1, help="Prefill tokens per second of an engine.")] = 5500.0,
    event_delay: Annotated[float, typer.Option(min=0, help="Seconds until the router hears of blocks.")] = 0.02,
    event_loss: Annotated[float, typer.Option(min=0, max=1, help="Share of messages lost for good.")] = 0.0,
    load_weight: Annotated[float, typer.Option(min=0, help="Part of the queue that counts (kv_affinity).")] = 0.25,
    prediction: Annotated[float, typer.Option(min=0, help="Seconds that routed blocks count as present.")] = 5.0,
    slow_nodes: Annotated[int, typer.Option(min=0, help="Engines at a third of the rate.")] = 0,
    clear_at: Annotated[float | None, typer.Option(min=0, help="Second at which the first engine is cleared.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 1,
    as_json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per policy.")] = False,
) -> None:
    """Replay a trace against the real placement code and index with simple engines: one prefill server and an LRU of
    blocks each. The numbers rank policies; they do not predict a cluster."""
    chosen = policy or [DEFAULT_POLICY]
    unknown = [name for name in chosen if name not in POLICIES]
    try:
        if unknown:
            raise TraceError(f"--policy {unknown[0]!r} does not exist; use one of {', '.join(POLICIES)}")
        if slow_nodes > nodes:
            raise TraceError(f"--slow-nodes is {slow_nodes}, but there are only {nodes} nodes")
        requests = read_trace(trace, block_size)
    except (TraceError, OSError) as error:
        typer.echo(f"kvroute simulate: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    outcomes: dict[str, Outcome] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in chosen:
            options = Options(
                nodes=nodes,
                policy=name,
                block_size=block_size,
                capacity=capacity,
                rate=rate,
                event_delay=event_delay,
                event_loss=event_loss,
                load_weight=load_weight,
                prediction=prediction,
                slow_nodes=slow_nodes,
                clear_at=clear_at,
                seed=seed,
            )
            task = progress.add_task(name, total=len(requests))
            outcomes[name] = simulate(requests, options, lambda done, task=task: progress.update(task, completed=done))  # type: ignore[misc]
    if as_json_lines:
        for name, outcome in outcomes.items():
            typer.echo(json.dumps({"policy": name, **outcome.as_dict()}))
    else:
        Console().print(_table(outcomes, f"{trace.name}: {len(requests)} requests, {nodes} nodes"))


def _table(outcomes: dict[str, Outcome], title: str) -> Table:
    table = Table(title=title)
    table.add_column("policy")
    for column in ("hits", "of ideal", "mean TTFT s", "p99 TTFT s", "busiest / mean"):
        table.add_column(column, justify="right")
    for name, one in outcomes.items():
        table.add_row(
            name,
            f"{one.hit_ratio:.3f}",
            f"{one.reached:.1%}",
            f"{one.mean_ttft:.2f}",
            f"{one.p99_ttft:.1f}",
            f"{one.busiest_to_mean:.3f}",
        )
    return table
