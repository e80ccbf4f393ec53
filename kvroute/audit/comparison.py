"""One engine rank: the blocks that its index entries claim against the blocks that it holds (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit found of an engine rank. Blocks of its NPU tier; rates are shares, None while nothing is known.

    measured_by: ``cache`` (the engine told what it holds), ``feedback`` (responses told their cached tokens), or
    ``nothing``. false_hits: claimed and not there; false_misses: there, reachable, and not claimed.
    """

    instance_id: str
    dp_rank: int
    state: str
    measured_by: str
    index_blocks: int
    engine_blocks: int | None = None
    false_hits: int | None = None
    false_misses: int | None = None
    false_hit_rate: float | None = None
    false_miss_rate: float | None = None
    responses: int = 0

    @property
    def worst_rate(self) -> float:
        """The larger of both rates, 0 while nothing is known."""
        return max(self.false_hit_rate or 0.0, self.false_miss_rate or 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The form of ``--json``."""
        return asdict(self)


def compared(
    instance_id: str, dp_rank: int, endpoint: Mapping[str, Any], truth: Mapping[str, Any], found: Sequence[int]
) -> Finding:
    """Compare. endpoint: the rank's entry in /workers; truth: what the engine holds (kvroute.sim.true_cache).

    found: for each of its chains, how many leading blocks the index promised.
    """
    held: set[int] = set()
    promised: set[int] = set()
    for chain, blocks in zip(truth["chains"], found, strict=True):
        held.update(chain["block_ids"])
        promised.update(chain["block_ids"][:blocks])
    claimed = int(endpoint["npu_blocks"])
    false_misses = len(held - promised)
    # Blocks behind a hole are held and may be claimed, but no query can show them.
    false_hits = max(0, claimed - len(promised) - int(truth["unreachable"]))
    return Finding(
        instance_id,
        dp_rank,
        state_of(endpoint),
        "cache",
        claimed,
        int(truth["blocks"]),
        false_hits,
        false_misses,
        false_hits / claimed if claimed else 0.0,
        false_misses / len(held) if held else 0.0,
    )


def from_feedback(instance_id: str, dp_rank: int, endpoint: Mapping[str, Any]) -> Finding:
    """What responses have told of a rank whose engine does not say what it holds."""
    feedback = endpoint.get("feedback") or {}
    responses = int(feedback.get("responses", 0))
    return Finding(
        instance_id,
        dp_rank,
        state_of(endpoint),
        "feedback" if responses else "nothing",
        int(endpoint["npu_blocks"]),
        false_hit_rate=feedback.get("false_hit_rate") if responses else None,
        false_miss_rate=feedback.get("false_miss_rate") if responses else None,
        responses=responses,
    )


def state_of(endpoint: Mapping[str, Any]) -> str:
    """The state word of a rank's stream; with a remark when its blocks are not offered."""
    stream = endpoint.get("stream") or {}
    word = str(stream.get("state", "unknown"))
    return word if stream.get("offered", True) else f"{word}, not offered"
