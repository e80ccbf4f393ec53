"""Audit: what an engine holds, told as chains, and its comparison with what the index claims (pure parts)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.audit.comparison import compared, from_feedback
from kvroute.sim.block_hashes import low64
from kvroute.sim.engine_rank import EngineRank, RankSpec

BLOCK = 4


def serve(rank: EngineRank, prompt: list[int], cache_salt: str | None = None) -> None:
    hashes = rank.hash_prompt(prompt, cache_salt, None)
    run = rank.start(prompt, 1, hashes=hashes, cache_salt=cache_salt)
    assert run is not None
    rank.step_events()
    rank.finish(run)


def truth_of(rank: EngineRank) -> dict[str, Any]:
    return rank.true_cache.report(rank.pool.cached_hashes)


def test_a_simulated_engine_tells_its_cache_as_chains_with_their_tokens() -> None:
    rank = EngineRank(RankSpec(BLOCK, 64))
    serve(rank, list(range(9)))
    serve(rank, [*range(4), *range(100, 109)])
    serve(rank, list(range(8)), cache_salt="s")
    truth = truth_of(rank)
    found = {(tuple(chain["token_ids"]), chain["cache_salt"]) for chain in truth["chains"]}
    assert found == {(tuple(range(8)), None), (tuple(range(8)), "s"), ((*range(4), *range(100, 108)), None)}
    assert (truth["blocks"], truth["unreachable"], truth["block_size"]) == (6, 0, BLOCK)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), max_size=30))
def test_the_chains_cover_exactly_what_can_be_hit_whatever_was_evicted(prompts: list[list[int]]) -> None:
    rank = EngineRank(RankSpec(BLOCK, 10))
    for prompt in prompts:
        serve(rank, prompt)
    truth = truth_of(rank)
    named = {name for chain in truth["chains"] for name in chain["block_ids"]}
    assert len(named) == truth["blocks"] - truth["unreachable"]
    assert named <= {low64(name) for name in rank.pool.cached_hashes}
    for chain in truth["chains"]:
        assert rank.npu_prefix(rank.hash_prompt(chain["token_ids"], None, None)) == len(chain["block_ids"])


TRUTH = {
    "blocks": 5,
    "unreachable": 1,
    "block_size": BLOCK,
    "chains": [
        {"block_ids": [1, 2, 3], "token_ids": []},
        {"block_ids": [1, 4], "token_ids": []},
    ],
}


@pytest.mark.parametrize(
    ("claimed", "found", "false_hits", "false_misses"),
    [
        (5, [3, 2], 0, 0),
        (4, [3, 2], 0, 0),
        (7, [3, 2], 2, 0),
        (3, [2, 2], 0, 1),
        (0, [0, 0], 0, 4),
        (6, [1, 1], 4, 3),
    ],
)
def test_t19_false_hits_and_false_misses_are_told_apart(
    claimed: int, found: list[int], false_hits: int, false_misses: int
) -> None:
    finding = compared("a", 0, {"npu_blocks": claimed, "stream": {"state": "live"}}, TRUTH, found)
    assert (finding.false_hits, finding.false_misses) == (false_hits, false_misses)
    assert (finding.state, finding.measured_by, finding.engine_blocks) == ("live", "cache", 5)


def test_an_engine_that_tells_nothing_is_judged_by_feedback_or_not_at_all() -> None:
    endpoint = {"npu_blocks": 3, "feedback": {"responses": 9, "false_hit_rate": 0.2, "false_miss_rate": 0.0}}
    finding = from_feedback("a", 0, endpoint | {"stream": {"state": "gapped", "offered": False}})
    assert (finding.measured_by, finding.worst_rate, finding.state) == ("feedback", 0.2, "gapped, not offered")
    nothing = from_feedback("a", 0, {"npu_blocks": 3, "feedback": {"responses": 0}})
    assert (nothing.measured_by, nothing.worst_rate, nothing.false_hit_rate) == ("nothing", 0.0, None)
