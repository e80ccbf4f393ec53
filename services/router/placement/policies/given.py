"""What every policy is given."""

from dataclasses import dataclass, field

from services.router.placement.cost import CostOptions
from services.router.placement.models import CandidateView, PlacementRequest


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    """Weights of the upstream-compatible policies, under their own names and with their defaults."""

    w_npu: float = 1.0
    w_cpu: float = 1.0
    w_disk: float = 0.0
    overlap_credit: float = 1.0
    prefill_load_scale: float = 1.0
    load_weight: float = 1.0
    load_gate_topn: int = 2
    hit_rate_threshold: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """views: at least one, all may be chosen. cached: tokens each need not compute. turn: decisions made before."""

    request: PlacementRequest
    views: list[CandidateView]
    cached: list[int]
    turn: int = 0
    cost: CostOptions = field(default_factory=CostOptions)
    upstream: UpstreamOptions = field(default_factory=UpstreamOptions)


Scores = list[float]
