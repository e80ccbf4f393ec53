"""The demo's load, its two policies and its figures."""

import io

import pytest
from rich.console import Console

from kvroute.demo.cluster import Cluster, Holdings, read_holdings
from kvroute.demo.placement import Match, Worker, most_saved_time, read_matches, round_robin
from kvroute.demo.results import Served, comparison_table, is_ahead, kept_promises, percentile, summarise
from kvroute.demo.view import View
from kvroute.demo.workload import Shape, conversations
from kvroute.sim.rank_server import output_tokens

A, B = Worker("a", 0), Worker("b", 1)
SMALL = Shape(conversations=4, system_prompts=2, system_tokens=40, question_tokens=(3, 9), answer_tokens=5)


def served(seconds: float = 0.1, cached: int = 64, promised: int | None = None) -> Served:
    return Served(0, 0, A, 100, cached, 2, 0, 0, seconds, promised)


def test_the_load_is_the_same_every_time() -> None:
    assert conversations(SMALL) == conversations(SMALL)
    assert conversations(SMALL) != conversations(SMALL, seed=8)


def test_a_turn_holds_the_whole_history_and_the_answer_the_engine_gave() -> None:
    for conversation in conversations(SMALL):
        for before, after in zip(conversation.turns, conversation.turns[1:], strict=False):
            history = [*before.prompt.tokens, *output_tokens(before.prompt)]
            assert list(after.prompt.tokens[: len(history)]) == history


def test_conversations_share_system_prompts() -> None:
    load = conversations(SMALL)
    assert load[0].turns[0].prompt.tokens[:40] == load[2].turns[0].prompt.tokens[:40]
    assert load[0].turns[0].prompt.tokens[:40] != load[1].turns[0].prompt.tokens[:40]


def test_the_answer_of_the_router_is_read_by_worker() -> None:
    counts = {"matched_tokens": 96, "npu_blocks": 1, "cpu_blocks": 2, "disk_blocks": 0}
    answer = {"default": {"a": {"longest_matched": 96, "DP": {"0": counts}}}}
    assert read_matches(answer) == {A: Match(1, 2, 0, 96)}
    assert read_matches({}) == {}


def test_what_lies_where_is_read_for_the_demos_own_cluster_only() -> None:
    def entry(instance_id: str, kind: str, **endpoints: dict[str, int]) -> dict[str, object]:
        return {"instance_id": instance_id, "kind": kind, "model_name": "m", "endpoints": endpoints}

    workers = [
        entry("a", "engine", **{"0": {"npu_blocks": 7}, "1": {"npu_blocks": 0}}),
        entry("stranger", "engine", **{"0": {"npu_blocks": 9}}),
        entry("pool", "pool", **{"0": {"cpu_blocks": 3, "disk_blocks": 2}}),
    ]
    cluster = Cluster("http://r", {"a": "http://a"}, 2, "m", 32)
    holdings = read_holdings({"workers": workers}, cluster)
    assert holdings == Holdings({Worker("a", 0): 7, Worker("a", 1): 0}, 3, 2)
    assert not holdings.empty
    assert Holdings({A: 0}, 0, 0).empty


def test_the_longest_match_wins_while_nobody_waits() -> None:
    assert most_saved_time([A, B], {A: Match(matched_tokens=32), B: Match(matched_tokens=64)}, {}) == B


def test_a_long_queue_outweighs_a_hit() -> None:
    matches = {A: Match(matched_tokens=100)}
    assert most_saved_time([A, B], matches, {A: 99}) == A
    assert most_saved_time([A, B], matches, {A: 101}) == B


def test_without_any_hit_the_least_loaded_worker_is_taken() -> None:
    assert most_saved_time([A, B], {}, {A: 5}) == B


def test_round_robin_takes_workers_in_turn() -> None:
    assert [round_robin([A, B], number) for number in range(3)] == [A, B, A]


def test_percentile_is_a_value_that_occurred() -> None:
    assert percentile([5, 1, 2, 4, 3], 0.99) == 5
    assert percentile([5, 1, 2, 4, 3], 0.5) == 3


def test_ahead_means_better_in_every_figure() -> None:
    better, worse = summarise([served(0.1, cached=96)]), summarise([served(0.2, cached=32)])
    slower = summarise([served(0.3, cached=96)])
    assert is_ahead(better, worse)
    assert not is_ahead(worse, better)
    assert not is_ahead(slower, worse)


def test_nothing_served_is_no_result() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarise([])


def test_promises_are_compared_only_where_the_router_was_asked() -> None:
    assert kept_promises([served(promised=64), served(promised=32), served()]) == (1, 2)


def test_the_table_shows_both_policies() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(comparison_table(summarise([served(cached=75)]), summarise([served(cached=25)])))
    text = console.export_text()
    for words in ("75.0%", "25.0%", "prefilled tokens", "time to first token, p99", "2 / 0 / 0"):
        assert words in text


def test_without_a_terminal_progress_comes_as_plain_lines() -> None:
    console = Console(width=160, record=True, file=io.StringIO(), force_terminal=False)
    with View(console) as view:
        view.phase("cache-aware", [A, B], 1)
        view.sent(A)
        view.served(served())
    text = console.export_text()
    assert "cache-aware: 1 requests to 2 DP ranks" in text
    assert "1/1 served, hit ratio 64%, blocks hit npu 2 / cpu 0 / disk 0" in text
    assert "\x1b" not in text


def test_on_a_terminal_every_worker_and_the_latest_placements_are_drawn() -> None:
    console = Console(width=160, record=True, file=io.StringIO(), force_terminal=True)
    with View(console) as view:
        view.phase("cache-aware", [A, B], 1)
        view.sent(A)
        view.served(served(promised=64))
        view.holdings(Holdings({A: 17}, 5, 3))
        console.print(view._render())
    text = console.export_text()
    for words in ("a dp0", "b dp1", "17", "holds 5 blocks in cpu, 3 on disk", "conversation   0 turn 1 → a dp0"):
        assert words in text
