"""Policies that look at no cache."""

import xxhash

from services.router.placement.policies.given import PolicyInput, Scores

_KV_WEIGHT = 0.3


def load_balance(given: PolicyInput) -> Scores:
    """Queued prefill tokens and 0.3 of the running decode blocks' tokens, the upstream measure of a prefill worker."""
    size = given.request.block_size
    return [view.queued_tokens + _KV_WEIGHT * view.decode_blocks * size for view in given.views]


def round_robin(given: PolicyInput) -> Scores:
    """In turn, in the order given."""
    count = len(given.views)
    return [float((place - given.turn) % count) for place in range(count)]


def consistent_hash(given: PolicyInput) -> Scores:
    """Rendezvous hashing of the first block: a worker that leaves or comes moves only its own share."""
    seed = given.request.first_key
    return [
        float(xxhash.xxh3_64_intdigest(f"{view.instance_id}/{view.dp_rank}".encode(), seed)) for view in given.views
    ]
