"""The upstream-compatible kv_cache_affinity modes (docs/compatibility.md), with weights per tier.

One defect is not kept: workers without a hit stay candidates, so that a cold worker gets its share.
"""

from services.router.placement.policies.given import PolicyInput, Scores

_KV_WEIGHT = 0.3


def unified(given: PolicyInput) -> Scores | None:
    """prefill_load_scale * prefill_cost + load_weight * load; None at or below hit_rate_threshold."""
    matched = _matched(given)
    if _below_threshold(given, matched):
        return None
    options = given.upstream
    return [
        options.prefill_load_scale * max(0.0, given.request.tokens - options.overlap_credit * hit)
        + options.load_weight * load
        for hit, load in zip(matched, _loads(given), strict=True)
    ]


def load_gated(given: PolicyInput) -> Scores | None:
    """Of the load_gate_topn least loaded the one with the most matched; None at or below hit_rate_threshold.

    A score is the rank in that order; who is equal in load and match shares a rank.
    """
    matched, loads = _matched(given), _loads(given)
    if _below_threshold(given, matched):
        return None
    # Equal loads pass the gate together: cutting between equals by list order would herd onto the first.
    limit = sorted(loads)[min(len(loads), given.upstream.load_gate_topn or 2) - 1]
    order = [(load > limit, -hit if load <= limit else 0, load) for hit, load in zip(matched, loads, strict=True)]
    ranks = {entry: float(rank) for rank, entry in enumerate(sorted(set(order)))}
    return [ranks[entry] for entry in order]


def _matched(given: PolicyInput) -> list[int]:
    options, request = given.upstream, given.request
    matched = []
    for view in given.views:
        npu, cpu_local, cpu_remote, disk_local, disk_remote = view.coverage
        blocks = (
            max(npu, view.predicted_blocks) * options.w_npu
            + (cpu_local + cpu_remote) * options.w_cpu
            + (disk_local + disk_remote) * options.w_disk
        )
        matched.append(min(round(blocks * request.block_size), request.tokens))
    return matched


def _loads(given: PolicyInput) -> list[float]:
    size = given.request.block_size
    return [view.queued_tokens + _KV_WEIGHT * view.decode_blocks * size for view in given.views]


def _below_threshold(given: PolicyInput, matched: list[int]) -> bool:
    threshold = given.upstream.hit_rate_threshold
    return threshold > 0 and max(matched) <= threshold * max(1, given.request.tokens)
