"""Accounts of a hop: what was received is applied, rejected, dropped or returned, and what is none of it is noticed."""

from services.runtime.accounts import MAX_REASONS, OTHERS, AccountMetrics, Accounts

A, B = ("engine", "a", 0), ("engine", "b", 0)


def samples(accounts: Accounts) -> dict[tuple[str, str, str, str], float]:
    found = {}
    for family in AccountMetrics("hop", accounts).collect():
        for sample in family.samples:
            labels = [sample.labels.get(name, "") for name in ("instance_id", "outcome", "reason")]
            found[sample.name, labels[0], labels[1], labels[2]] = sample.value
    return found


def test_t09_what_is_decided_adds_up_and_what_is_not_is_lost_and_told_once() -> None:
    accounts = Accounts(lambda key: True)
    account = accounts.of(A)
    account.received = 10
    account.applied = 4
    account.reject("malformed", 2)
    account.drop("repeated", 3)
    assert account.in_hand == 1
    assert accounts.check() == {A: 1}
    assert accounts.check() == {}
    assert accounts.lost == 1
    account.applied += 2
    assert accounts.check() == {A: -2}, "counted twice"
    assert accounts.lost == 3


def test_what_cannot_be_used_at_all_is_booked_under_its_reason() -> None:
    accounts = Accounts(lambda key: True)
    accounts.of(A).received = 5
    accounts.of(A).applied = 2
    accounts.give_up("failed")
    assert accounts.check() == {}
    assert accounts.of(A).rejected == {"failed": 3}


def test_t39_publishers_that_nobody_registered_share_one_account_and_reasons_are_bounded() -> None:
    accounts = Accounts(lambda key: key == A)
    for number in range(1000):
        accounts.of(("engine", f"stranger-{number}", 0)).drop(f"reason {number}")
    accounts.of(A).received = accounts.of(A).applied = 1
    assert [key for key, _ in accounts.items()] == [OTHERS, A]
    assert len(accounts.of(OTHERS).dropped) == MAX_REASONS + 1
    assert accounts.of(OTHERS).dropped.total() == 1000


def test_a_publisher_that_left_takes_its_series_along_and_its_counts_stay() -> None:
    registered = {A, B}
    accounts = Accounts(lambda key: key in registered)
    for key in (A, B):
        accounts.of(key).received = accounts.of(key).applied = 7
    assert samples(accounts)["kvroute_hop_publisher_events_total", "a", "applied", ""] == 7
    registered.discard(A)
    assert ("kvroute_hop_publisher_events_total", "a", "applied", "") not in samples(accounts)
    assert accounts.check() == {}
    found = samples(accounts)
    assert found["kvroute_hop_publisher_events_total", "", "applied", ""] == 7
    assert found["kvroute_hop_publisher_events_total", "b", "applied", ""] == 7
    assert found["kvroute_hop_lost_events_total", "", "", ""] == 0
