"""Expected time to first token of a request on a candidate, in seconds."""

from dataclasses import dataclass

from services.router.placement.models import CandidateView, PlacementRequest


@dataclass(frozen=True, slots=True)
class CostOptions:
    """load_weight: part of the queue that counts; below 1 keeps more hits for little time (docs/placement.md).

    The others: tokens per second at which blocks come from a pool tier, on the same node and from another one.
    """

    load_weight: float = 0.25
    cpu_local_rate: float = 200_000.0
    cpu_remote_rate: float = 100_000.0
    disk_local_rate: float = 40_000.0
    disk_remote_rate: float = 30_000.0

    def __post_init__(self) -> None:
        if self.load_weight < 0:
            raise ValueError(f"load_weight is {self.load_weight}, it must be 0 or more")
        for name in ("cpu_local_rate", "cpu_remote_rate", "disk_local_rate", "disk_remote_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be above 0 tokens per second")


def cached_tokens(request: PlacementRequest, view: CandidateView) -> int:
    """Tokens that need no computing: what the index promises or was just routed there, at most the prompt."""
    return min(max(sum(view.coverage), view.predicted_blocks) * request.block_size, request.tokens)


def fetch_seconds(request: PlacementRequest, view: CandidateView, options: CostOptions) -> float:
    """Time until blocks of a pool are in the worker's memory; blocks predicted there need no fetching."""
    coverage = view.coverage
    if sum(coverage) == coverage.npu or view.predicted_blocks >= sum(coverage):
        return 0.0
    return request.block_size * (
        coverage.cpu_local / options.cpu_local_rate
        + coverage.cpu_remote / options.cpu_remote_rate
        + coverage.disk_local / options.disk_local_rate
        + coverage.disk_remote / options.disk_remote_rate
    )


def seconds_to_first_token(request: PlacementRequest, view: CandidateView, cached: int, options: CostOptions) -> float:
    """Weighted queue, missing tokens and fetching; the last token is computed always."""
    missing = max(1, request.tokens - cached)
    return (options.load_weight * view.queued_tokens + missing) / view.rate + fetch_seconds(request, view, options)
