"""From health checks to a verdict: so many failures make an engine dead, one success brings it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.liveness import Liveness, LivenessState, dump_liveness, load_liveness
from services.coordinator.liveness.verdict import EngineHealth, is_asleep


def test_an_engine_is_dead_after_enough_failures_in_a_row_and_alive_after_one_success() -> None:
    health = EngineHealth()
    assert health.observe("", 3, 1.0)
    assert health.state is LivenessState.ALIVE
    assert [health.observe("refused", 3, 2.0 + n) for n in range(4)] == [False, False, True, False]
    assert (health.state, health.since, health.reason) == (LivenessState.DEAD, 4.0, "refused")
    assert health.observe("", 3, 9.0)
    assert (health.state, health.since, health.reason) == (LivenessState.ALIVE, 9.0, "")


def test_nothing_is_said_before_enough_is_known() -> None:
    health = EngineHealth()
    assert not health.observe("refused", 2, 1.0)
    assert health.state is None


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_state_follows_the_last_checks_alone(checks: list[bool], needed: int) -> None:
    health = EngineHealth()
    for moment, ok in enumerate(checks):
        health.observe("" if ok else "refused", needed, float(moment))
        tail = checks[: moment + 1][-needed:]
        if ok:
            assert health.state is LivenessState.ALIVE
        elif len(tail) == needed and not any(tail):
            assert health.state is LivenessState.DEAD
        else:
            assert health.state is not LivenessState.DEAD


@pytest.mark.parametrize(
    ("page", "asleep"),
    [
        ("", False),
        ("vllm:num_requests_running 3.0\n", False),
        ("# HELP vllm:engine_sleep_state x\nvllm:engine_sleep_state 1\n", True),
        ("vllm:engine_sleep_state 0.0\n", False),
        ('vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0\n', False),
        (
            'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
            'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0\n'
            'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0\n',
            True,
        ),
        ('engine_sleep_state{engine="0"} 1.0\n', True),
    ],
)
def test_ex_04_an_engines_metrics_tell_that_it_sleeps(page: str, asleep: bool) -> None:
    assert is_asleep(page) is asleep


def test_a_sleeping_engine_is_alive_without_a_cache() -> None:
    health = EngineHealth()
    health.observe("", 3, 1.0)
    health.asleep = True
    assert health.observe("", 3, 2.0)
    assert health.state is LivenessState.ASLEEP
    health.asleep = False
    assert health.observe("", 3, 3.0)
    assert health.state is LivenessState.ALIVE


def test_records_survive_the_wire_and_nonsense_is_a_value_error() -> None:
    record = Liveness("a", 1, LivenessState.DEAD, 1.0, 2.0, 3, "refused")
    assert load_liveness(dump_liveness(record)) == record
    for bad in (b"", b"{}", b'{"state": "zombie"}', b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            load_liveness(bad)
