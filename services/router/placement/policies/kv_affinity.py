"""The default: the least expected time to first token, decided per request; no switch turns affinity off for all."""

from services.router.placement.cost import seconds_to_first_token
from services.router.placement.policies.given import PolicyInput, Scores


def kv_affinity(given: PolicyInput) -> Scores:
    """Seconds to the first token with the queue weighted (CostOptions.load_weight)."""
    request, cost = given.request, given.cost
    return [
        seconds_to_first_token(request, view, cached, cost)
        for view, cached in zip(given.views, given.cached, strict=True)
    ]
