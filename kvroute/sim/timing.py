"""How long a simulated engine takes to its first token: linear in the tokens it computes and the tokens it loads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """Tokens per second per way of getting a token's KV; overhead: seconds per request; seconds per output token."""

    prefill: float = 10_000.0
    local_cpu: float = 400_000.0
    remote_cpu: float = 150_000.0
    disk: float = 60_000.0
    overhead: float = 0.005
    per_output_token: float = 0.002


@dataclass(frozen=True)
class PrefillWork:
    """Tokens of one prompt by where their KV comes from (device hits cost nothing)."""

    computed: int
    local_cpu: int = 0
    remote_cpu: int = 0
    disk: int = 0


def prefill_seconds(work: PrefillWork, speed: Speed) -> float:
    """Time from the start of a prompt's prefill to its first token, in seconds."""
    return (
        speed.overhead
        + work.computed / speed.prefill
        + work.local_cpu / speed.local_cpu
        + work.remote_cpu / speed.remote_cpu
        + work.disk / speed.disk
    )
