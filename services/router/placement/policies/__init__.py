"""Policies: small pure functions from a request and its candidates to scores; the smallest score is chosen."""

from services.router.placement.policies.kv_affinity import kv_affinity
from services.router.placement.policies.simple import consistent_hash, load_balance, round_robin
from services.router.placement.policies.upstream import load_gated, unified

DEFAULT_POLICY = "kv_affinity"
POLICIES = {
    "kv_affinity": kv_affinity,
    "load_balance": load_balance,
    "round_robin": round_robin,
    "consistent_hash": consistent_hash,
    "unified": unified,
    "load_gated": load_gated,
}
"""By name; see PolicyInput for what they are given. None instead of scores: the policy gives way to load_balance."""
