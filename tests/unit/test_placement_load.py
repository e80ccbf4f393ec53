"""The load account returns to zero whatever happens; predictions are short-lived and bounded."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.load import Load, LoadAccount
from services.router.placement.prediction import Prediction

A, B = ("a", 0), ("b", 1)


def test_rt_02_load_is_there_from_the_moment_of_the_charge_until_completion() -> None:
    account = LoadAccount()
    account.charge("r1", A, 1000, 8, now=0.0)
    assert account.of(A) == Load(1000, 8, 1)
    assert account.prefill_done("r1")
    assert not account.prefill_done("r1")
    assert account.of(A) == Load(0, 8, 1)
    assert account.complete("r1")
    assert account.of(A) == Load()


def test_t36_unknown_and_repeated_completions_are_harmless() -> None:
    account = LoadAccount()
    account.charge("r1", A, 1000, 8, now=0.0)
    assert [account.complete("r1"), account.complete("r1"), account.complete("other")] == [True, False, False]
    assert account.of(A) == Load()
    assert account.unknown == 2


def test_a_receipt_is_charged_once_and_work_is_never_negative() -> None:
    account = LoadAccount()
    account.charge("r1", A, 1, 1, now=0.0)
    with pytest.raises(ValueError, match="r1 is charged already"):
        account.charge("r1", B, 1, 1, now=0.0)
    with pytest.raises(ValueError, match="negative"):
        account.charge("r2", B, -1, 0, now=0.0)


def test_leases_expire_and_their_number_is_bounded() -> None:
    account = LoadAccount(lease_seconds=10, max_leases=2)
    for number in range(3):
        account.charge(f"r{number}", A, 10, 1, now=float(number))
    assert (len(account), account.expired, account.of(A)) == (2, 1, Load(20, 2, 2))
    assert account.expire(12.0) == 2
    assert account.of(A) == Load()
    assert not account.complete("r2")


@given(
    st.lists(
        st.tuples(st.sampled_from(["charge", "done", "complete", "expire"]), st.integers(0, 9), st.integers(0, 500)),
        max_size=80,
    )
)
def test_t36_every_counter_returns_to_zero_after_any_mix(steps: list[tuple[str, int, int]]) -> None:
    account = LoadAccount(lease_seconds=3, max_leases=5)
    for now, (step, number, tokens) in enumerate(steps):
        receipt = f"r{number}"
        if step == "charge":
            account.complete(receipt)
            account.charge(receipt, (A, B)[number % 2], tokens, number, float(now))
        elif step == "done":
            account.prefill_done(receipt)
        elif step == "complete":
            account.complete(receipt)
        else:
            account.expire(float(now))
        for worker in (A, B):
            assert min(account.of(worker)) >= 0
    account.expire(1e9)
    assert (len(account), account.of(A), account.of(B)) == (0, Load(), Load())


def test_t37_siblings_of_a_burst_find_the_blocks_before_the_first_event() -> None:
    prediction = Prediction(seconds=5)
    prediction.routed(A, array("Q", [1, 2, 3]), now=0.0)
    assert prediction.leading_blocks(A, array("Q", [1, 2, 9, 10]), now=4.9) == 2
    assert prediction.leading_blocks(A, array("Q", [1, 2, 3]), now=4.9) == 3
    assert prediction.leading_blocks(B, array("Q", [1, 2, 3]), now=4.9) == 0
    assert prediction.leading_blocks(A, array("Q", [1, 2, 3]), now=5.0) == 0


def test_predictions_are_bounded_and_a_lost_cache_takes_them_along() -> None:
    prediction = Prediction(seconds=5, max_blocks=4)
    prediction.routed(A, array("Q", [1, 2, 3]), now=0.0)
    prediction.routed(B, array("Q", [7, 8]), now=1.0)
    assert prediction.blocks == 2
    assert prediction.leading_blocks(A, array("Q", [1]), now=1.0) == 0
    prediction.forget(B)
    assert prediction.leading_blocks(B, array("Q", [7]), now=1.0) == 0
    prediction.expire(100.0)
    assert prediction.blocks == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 4)), max_size=40))
def test_halving_finds_what_a_walk_finds(steps: list[tuple[int, int, int]]) -> None:
    prediction, now = Prediction(seconds=6, max_blocks=12), 0.0
    for branch, length, wait in steps:
        now += wait
        # Chains share block 1 and part after it, as prefixes do.
        keys = array("Q", [1, *(100 * branch + depth for depth in range(2, length + 1))])
        prediction.routed(A, keys, now)
        singly = [prediction.leading_blocks(A, keys[: depth + 1], now) == depth + 1 for depth in range(len(keys))]
        assert all(singly)
        for other in range(4):
            chain = array("Q", [1, *(100 * other + depth for depth in range(2, 7))])
            walked = 0
            while walked < 6 and prediction.leading_blocks(A, chain[: walked + 1], now) == walked + 1:
                walked += 1
            assert prediction.leading_blocks(A, chain, now) == walked
