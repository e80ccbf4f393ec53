"""What a load run measured, and the table that compares two runs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from kvroute.demo.placement import Worker


@dataclass(frozen=True)
class Served:
    """One request as the client saw it. Blocks: where the engine really found the prompt's prefix; promised_tokens:
    what the router had said, None when it was not asked; seconds: to the first token, placement included."""

    conversation: int
    turn: int
    worker: Worker
    prompt_tokens: int
    cached_tokens: int
    npu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    seconds: float
    promised_tokens: int | None = None


@dataclass(frozen=True)
class Summary:
    """Figures of one policy. hit_ratio: cached / prompt tokens; times in seconds."""

    requests: int
    hit_ratio: float
    prompt_tokens: int
    prefilled_tokens: int
    npu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    mean_seconds: float
    p99_seconds: float


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; share between 0 and 1."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(served: Sequence[Served]) -> Summary:
    """Raises ValueError when nothing was served."""
    if not served:
        raise ValueError("no request was served")
    prompt_tokens = sum(request.prompt_tokens for request in served)
    cached = sum(request.cached_tokens for request in served)
    seconds = [request.seconds for request in served]
    return Summary(
        requests=len(served),
        hit_ratio=cached / prompt_tokens,
        prompt_tokens=prompt_tokens,
        prefilled_tokens=prompt_tokens - cached,
        npu_blocks=sum(request.npu_blocks for request in served),
        cpu_blocks=sum(request.cpu_blocks for request in served),
        disk_blocks=sum(request.disk_blocks for request in served),
        mean_seconds=statistics.fmean(seconds),
        p99_seconds=percentile(seconds, 0.99),
    )


def is_ahead(aware: Summary, robin: Summary) -> bool:
    """Whether cache-aware placement won on every figure of the table."""
    return (
        aware.hit_ratio > robin.hit_ratio
        and aware.prefilled_tokens < robin.prefilled_tokens
        and aware.mean_seconds < robin.mean_seconds
        and aware.p99_seconds < robin.p99_seconds
    )


def kept_promises(served: Sequence[Served]) -> tuple[int, int]:
    """Requests whose engine had exactly what the router said, out of those for which it was asked."""
    asked = [request for request in served if request.promised_tokens is not None]
    return sum(request.promised_tokens == request.cached_tokens for request in asked), len(asked)


def comparison_table(aware: Summary, robin: Summary) -> Table:
    """The table at the end of the demo."""
    table = Table(title="cache-aware placement vs round robin")
    for heading in ("", "cache-aware", "round robin"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = [
        ("requests", f"{aware.requests}", f"{robin.requests}"),
        ("prompt tokens", f"{aware.prompt_tokens:,}", f"{robin.prompt_tokens:,}"),
        ("hit ratio", f"{aware.hit_ratio:.1%}", f"{robin.hit_ratio:.1%}"),
        ("prefilled tokens", f"{aware.prefilled_tokens:,}", f"{robin.prefilled_tokens:,}"),
        ("blocks hit npu / cpu / disk", _blocks(aware), _blocks(robin)),
        ("time to first token, mean", _milliseconds(aware.mean_seconds), _milliseconds(robin.mean_seconds)),
        ("time to first token, p99", _milliseconds(aware.p99_seconds), _milliseconds(robin.p99_seconds)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _blocks(summary: Summary) -> str:
    return f"{summary.npu_blocks:,} / {summary.cpu_blocks:,} / {summary.disk_blocks:,}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
