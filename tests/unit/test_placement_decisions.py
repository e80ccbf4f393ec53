"""Placement decides by expected time, spreads ties, filters hard and names every way to lose affinity."""

import time
from collections import Counter
from random import Random

import pytest

from services.router.index.port import Coverage
from services.router.placement.cost import CostOptions
from services.router.placement.decide import decide
from services.router.placement.models import CandidateView, NoCandidateError, PlacementRequest, Reason
from services.router.placement.policies import POLICIES
from services.router.placement.policies.given import UpstreamOptions

REQUEST = PlacementRequest(tokens=8192, block_size=128, blocks=64, first_key=7)


def npu(blocks: int) -> Coverage:
    return Coverage(blocks, 0, 0, 0, 0)


def worker(name: str, **fields: object) -> CandidateView:
    return CandidateView(name, **fields)  # type: ignore[arg-type]


def test_the_worker_with_the_prefix_wins_and_the_runner_up_is_named() -> None:
    decision = decide(REQUEST, [worker("a"), worker("b", coverage=npu(60)), worker("c", coverage=npu(10))], Random(1))
    assert decision.chosen.view.instance_id == "b"
    assert decision.chosen.prefill_tokens == 512
    assert decision.runner_up is not None
    assert decision.runner_up.view.instance_id == "c"
    assert decision.reason is Reason.AFFINITY


def test_t35_a_long_queue_spills_this_request_only() -> None:
    views = [worker("a", coverage=npu(60), queued_tokens=100_000), worker("b")]
    assert decide(REQUEST, views, Random(1)).reason is Reason.SPILL
    other = [worker("a", queued_tokens=100_000), worker("b", coverage=npu(60))]
    assert decide(REQUEST, other, Random(1)).reason is Reason.AFFINITY


def test_rt_10_a_match_of_one_block_does_not_outweigh_an_empty_queue() -> None:
    views = [worker("a", coverage=npu(1), queued_tokens=8192), worker("b")]
    assert decide(REQUEST, views, Random(1)).chosen.view.instance_id == "b"


@pytest.mark.parametrize("policy", ["kv_affinity", "load_balance", "unified", "load_gated"])
def test_t33_rt_05_ties_are_spread_at_random(policy: str) -> None:
    random = Random(2)
    views = [worker(name) for name in "abcd"]
    chosen = Counter(decide(REQUEST, views, random, policy).chosen.view.instance_id for _ in range(400))
    assert min(chosen[name] for name in "abcd") > 60


def test_a_node_at_a_third_of_the_speed_gets_less() -> None:
    decision = decide(REQUEST, [worker("slow", rate=2000.0), worker("fast", rate=6000.0)], Random(1))
    assert decision.chosen.view.instance_id == "fast"


def test_blocks_in_slower_and_farther_tiers_cost_more() -> None:
    names = ("npu", "cpu_local", "cpu_remote", "disk_local", "disk_remote")
    views = [worker(name, coverage=Coverage(**{**npu(0)._asdict(), name: 40})) for name in names]
    decision = decide(REQUEST, views, Random(1))
    assert [one.view.instance_id for one in sorted(decision.candidates, key=lambda one: one.score)] == list(names)


@pytest.mark.parametrize(
    ("request_", "views", "reason"),
    [
        (PlacementRequest(100, 128), [worker("a")], Reason.SHORTER_THAN_BLOCK),
        (PlacementRequest(4000, 128, has_content=False), [worker("a")], Reason.NO_CONTENT),
        (REQUEST, [worker("a", block_size=16)], Reason.OTHER_BLOCK_SIZE),
        (REQUEST, [worker("a", live=False)], Reason.NO_STREAM_LIVE),
        (REQUEST, [worker("a"), worker("b", live=False)], Reason.NO_OVERLAP),
    ],
)
def test_t31_a_decision_without_blocks_says_why(
    request_: PlacementRequest, views: list[CandidateView], reason: Reason
) -> None:
    assert decide(request_, views, Random(1)).reason is reason


def test_filters_never_give_way_and_say_who_they_left_out() -> None:
    views = [worker("dead", takes_requests=False, coverage=npu(64)), worker("d", role="decode"), worker("p")]
    asked = PlacementRequest(8192, 128, 64, role="prefill")
    assert decide(asked, views, Random(1)).chosen.view.instance_id == "p"
    nobody = PlacementRequest(8192, 128, 64, role="prefill", excluded=frozenset({"p"}))
    with pytest.raises(NoCandidateError, match="1 dead or paused, 1 excluded, 1 other role"):
        decide(nobody, views, Random(1))
    listed = PlacementRequest(8192, 128, 64, candidates=frozenset({"d"}))
    assert decide(listed, views, Random(1)).chosen.view.instance_id == "d"
    with pytest.raises(NoCandidateError, match="not registered for this model"):
        decide(REQUEST, [], Random(1))


def test_round_robin_takes_turns_and_hashing_moves_only_the_share_of_who_left() -> None:
    views = [worker(name) for name in "abcd"]
    turns = [decide(REQUEST, views, Random(1), "round_robin", turn=n).chosen.view.instance_id for n in range(5)]
    assert turns == ["a", "b", "c", "d", "a"]

    def owner(key: int, among: list[CandidateView]) -> str:
        asked = PlacementRequest(8192, 128, 64, first_key=key)
        return decide(asked, among, Random(1), "consistent_hash").chosen.view.instance_id

    before = {key: owner(key, views) for key in range(200)}
    after = {key: owner(key, views[:3]) for key in range(200)}
    assert all(after[key] == before[key] for key in before if before[key] != "d")
    assert len(set(before.values())) == 4


def test_unified_uses_the_upstream_weights() -> None:
    views = [worker("disk", coverage=Coverage(0, 0, 0, 64, 0)), worker("cpu", coverage=Coverage(0, 32, 0, 0, 0))]
    decision = decide(REQUEST, views, Random(1), "unified")
    assert [one.score for one in decision.candidates] == [8192.0, 4096.0]
    low = UpstreamOptions(hit_rate_threshold=0.5)
    assert decide(REQUEST, views, Random(1), "unified", upstream=low).reason is Reason.FALLBACK


def test_load_gated_takes_the_best_match_of_the_least_loaded() -> None:
    views = [
        worker("best", coverage=npu(64), queued_tokens=9000),
        worker("good", coverage=npu(32), queued_tokens=100),
        worker("none"),
    ]
    assert decide(REQUEST, views, Random(1), "load_gated").chosen.view.instance_id == "good"


def test_wrong_options_name_the_field() -> None:
    with pytest.raises(ValueError, match="load_weight"):
        CostOptions(load_weight=-1)
    with pytest.raises(ValueError, match="policy is 'best'; use one of kv_affinity"):
        decide(REQUEST, [worker("a")], Random(1), "best")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_among_64_workers_is_far_below_300_microseconds(policy: str) -> None:
    random = Random(3)
    views = [worker(f"w{n}", coverage=npu(n % 60), queued_tokens=n * 100) for n in range(64)]
    best = float("inf")
    for _ in range(50):
        started = time.perf_counter()
        decide(REQUEST, views, random, policy)
        best = min(best, time.perf_counter() - started)
    assert best < 300e-6
