"""Who may take a request at all. Filters are hard: they never give way, the caller hears who was left out."""

from collections.abc import Sequence

from services.router.placement.models import CandidateView, NoCandidateError, PlacementRequest

_UNBOUND_ROLES = (None, "any", "both", "union", "hybrid")


def eligible(request: PlacementRequest, views: Sequence[CandidateView]) -> list[CandidateView]:
    """Views that pass every filter, in order. Raises NoCandidateError that counts what each filter took."""
    kept: list[CandidateView] = []
    lost = {"not registered for this model": 0 if views else 1, "dead or paused": 0, "not in candidates": 0}
    lost |= {"excluded": 0, "other role": 0}
    for view in views:
        if not view.takes_requests:
            lost["dead or paused"] += 1
        elif request.candidates is not None and view.instance_id not in request.candidates:
            lost["not in candidates"] += 1
        elif view.instance_id in request.excluded:
            lost["excluded"] += 1
        elif request.role not in _UNBOUND_ROLES and view.role not in _UNBOUND_ROLES and view.role != request.role:
            lost["other role"] += 1
        else:
            kept.append(view)
    if not kept:
        taken = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
        raise NoCandidateError(f"no worker may take the request: {taken}")
    return kept
