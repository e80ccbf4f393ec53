"""Feedback of what engines really had cached: false hits and false misses, counted in whole blocks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.registry import EngineRecord
from services.router.encodings import BodyRefusedError
from services.router.feedback import MAX_RESPONSES, Feedback, Response, read_feedback, usable

BLOCK = 16
A = ("a", 0)


def feedback(*names: str) -> Feedback:
    engines = {(name, 0): EngineRecord(instance_id=name, model="m", block_size=BLOCK) for name in names}
    return Feedback(lambda: engines)


def read(body: dict[str, Any]) -> list[Response]:
    return read_feedback(body, {"r-1": Response(A, 64, 0, 100)}.get)


def test_what_was_promised_and_not_had_is_a_false_hit() -> None:
    drift = feedback("a")
    assert drift.take([Response(A, 64, 32), Response(A, 64, 64)]) == 2
    found = drift.of(A)
    assert (found.false_hits, found.false_misses, found.promised, found.cached) == (32, 0, 128, 96)
    assert found.false_hit_rate == pytest.approx(0.25)


def test_what_was_had_and_not_promised_is_a_false_miss_in_whole_blocks() -> None:
    drift = feedback("a")
    drift.take([Response(A, 32, 32 + 2 * BLOCK + 3)])
    assert (drift.of(A).false_hits, drift.of(A).false_misses) == (0, 2 * BLOCK)


def test_the_last_block_of_a_prompt_of_whole_blocks_is_never_taken_from_a_cache() -> None:
    assert usable(64, 64, BLOCK) == 48
    assert usable(64, 65, BLOCK) == 64
    assert usable(64, 0, BLOCK) == 64
    drift = feedback("a")
    drift.take([Response(A, 64, 48, 64)])
    assert (drift.of(A).false_hits, drift.of(A).false_misses) == (0, 0)


def test_t39_unregistered_instances_are_not_counted_and_leave_no_series() -> None:
    engines = {A: EngineRecord(instance_id="a", model="m", block_size=BLOCK)}
    drift = Feedback(lambda: engines)
    assert drift.take([Response(("nobody", 0), 1, 1), Response(A, 1, 1)]) == 1
    assert {sample.labels["instance_id"] for family in drift.collect() for sample in family.samples} == {"a"}
    engines.clear()
    assert [sample for family in drift.collect() for sample in family.samples] == []


def test_a_body_is_one_response_or_a_list_or_names_a_receipt() -> None:
    one = {"instance_id": "a", "promised_tokens": 64, "cached_tokens": 48, "prompt_tokens": 70}
    assert read(one) == [Response(A, 64, 48, 70)]
    assert read({"responses": [one, {"receipt_id": "r-1", "cached_tokens": 16}]}) == [
        Response(A, 64, 48, 70),
        Response(A, 64, 16, 100),
    ]


@pytest.mark.parametrize(
    ("body", "field", "status"),
    [
        ({}, "cached_tokens", 400),
        ({"cached_tokens": 1}, "instance_id", 400),
        ({"cached_tokens": 1, "instance_id": "a"}, "promised_tokens", 400),
        ({"cached_tokens": -1, "instance_id": "a", "promised_tokens": 1}, "cached_tokens", 400),
        ({"cached_tokens": True, "instance_id": "a", "promised_tokens": 1}, "cached_tokens", 400),
        ({"cached_tokens": 1, "receipt_id": "gone"}, "receipt_id", 404),
        ({"cached_tokens": 1, "receipt_id": 7}, "receipt_id", 404),
        ({"responses": {}}, "responses", 400),
        ({"responses": [{}] * (MAX_RESPONSES + 1)}, "responses", 413),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_by_field(body: dict[str, Any], field: str, status: int) -> None:
    with pytest.raises(BodyRefusedError, match=field) as error:
        read(body)
    assert error.value.status == status


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=50))
def test_rates_are_shares_and_hits_never_exceed_promises(responses: list[tuple[int, int]]) -> None:
    drift = feedback("a")
    drift.take([Response(A, promised, cached) for promised, cached in responses])
    found = drift.of(A)
    assert 0 <= found.false_hit_rate <= 1
    assert 0 <= found.false_miss_rate <= 1
    assert found.false_hits <= found.promised
    assert found.false_misses <= found.cached
