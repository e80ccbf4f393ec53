"""The two policies the demo compares. Both are plain functions of what a gateway knows when a request comes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Worker:
    """A DP rank of an engine."""

    instance_id: str
    dp_rank: int


@dataclass(frozen=True)
class Match:
    """What the router says a worker can reuse of a prompt, in blocks."""

    npu_blocks: int = 0
    cpu_blocks: int = 0
    disk_blocks: int = 0
    matched_tokens: int = 0


def read_matches(answer: Mapping[str, Any], tenant: str = "default") -> dict[Worker, Match]:
    """The router's /query answer by worker."""
    return {
        Worker(instance_id, int(rank)): Match(
            npu_blocks=counts["npu_blocks"],
            cpu_blocks=counts["cpu_blocks"],
            disk_blocks=counts["disk_blocks"],
            matched_tokens=counts["matched_tokens"],
        )
        for instance_id, instance in answer.get(tenant, {}).items()
        for rank, counts in instance["DP"].items()
    }


def most_saved_time(
    workers: Sequence[Worker], matches: Mapping[Worker, Match], backlog: Mapping[Worker, int]
) -> Worker:
    """The worker where the tokens saved, less the tokens queued before it, are most; the least loaded one on a tie.

    backlog: tokens that a worker still has to compute.
    """

    def saved(worker: Worker) -> tuple[int, int]:
        match = matches.get(worker, Match())
        return match.matched_tokens - backlog.get(worker, 0), -backlog.get(worker, 0)

    return max(workers, key=saved)


def round_robin(workers: Sequence[Worker], number: int) -> Worker:
    """The workers in turn."""
    return workers[number % len(workers)]
