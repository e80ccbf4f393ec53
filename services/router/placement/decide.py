"""One decision: filter, score by a policy, choose at random among equals, say why."""

from collections.abc import Sequence
from random import Random

from services.router.placement.cost import CostOptions, cached_tokens
from services.router.placement.filters import eligible
from services.router.placement.models import CandidateView, Decision, PlacementRequest, Reason, Scored
from services.router.placement.policies import DEFAULT_POLICY, POLICIES
from services.router.placement.policies.given import PolicyInput, UpstreamOptions
from services.router.placement.policies.simple import load_balance

_COST = CostOptions()
_UPSTREAM = UpstreamOptions()
_LOOK_AT_CACHE = ("kv_affinity", "unified", "load_gated")


def decide(
    request: PlacementRequest,
    views: Sequence[CandidateView],
    random: Random,
    policy: str = DEFAULT_POLICY,
    turn: int = 0,
    cost: CostOptions = _COST,
    upstream: UpstreamOptions = _UPSTREAM,
) -> Decision:
    """Choose a worker. Raises NoCandidateError, and ValueError for a policy that does not exist."""
    score = POLICIES.get(policy)
    if score is None:
        raise ValueError(f"policy is {policy!r}; use one of {', '.join(POLICIES)}")
    kept = eligible(request, views)
    cached = [cached_tokens(request, view) for view in kept]
    given = PolicyInput(request, kept, cached, turn, cost, upstream)
    scores = score(given)
    fell_back = scores is None
    if scores is None:
        scores = load_balance(given)
    chosen = _smallest(scores, random, -1)
    second = _smallest(scores, random, chosen) if len(scores) > 1 else None
    considered = tuple(
        Scored(view, value, hit, max(0, request.tokens - hit))
        for view, value, hit in zip(kept, scores, cached, strict=True)
    )
    return Decision(
        considered[chosen],
        None if second is None else considered[second],
        _reason(request, kept, cached, chosen, policy, fell_back),
        policy,
        considered,
    )


def _smallest(scores: Sequence[float], random: Random, but: int) -> int:
    best = min(score for place, score in enumerate(scores) if place != but)
    # Ties by list order send every burst of a cold start to the first worker.
    return random.choice([place for place, score in enumerate(scores) if score == best and place != but])


def _reason(
    request: PlacementRequest,
    views: Sequence[CandidateView],
    cached: Sequence[int],
    chosen: int,
    policy: str,
    fell_back: bool,
) -> Reason:
    if policy not in _LOOK_AT_CACHE:
        return Reason.POLICY
    most = max(cached)
    if most:
        if fell_back:
            return Reason.FALLBACK
        return Reason.AFFINITY if cached[chosen] == most else Reason.SPILL
    if not request.has_content:
        return Reason.NO_CONTENT
    if not request.blocks:
        return Reason.SHORTER_THAN_BLOCK
    if all(view.block_size not in (0, request.block_size) for view in views):
        return Reason.OTHER_BLOCK_SIZE
    if not any(view.live for view in views):
        return Reason.NO_STREAM_LIVE
    return Reason.FALLBACK if fell_back else Reason.NO_OVERLAP
