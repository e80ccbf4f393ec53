"""Batches written as each release writes them, and read back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import U64_MASK, Tier
from schemas.wire import vllm
from schemas.wire.types import WireCleared, WireRemoved, WireStored
from schemas.wire.vllm_encode import FORMS, encode_batch, form_of
from tests.captures import publisher_capture, publisher_capture_names

HASHES = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.binary(min_size=8, max_size=8), st.binary(min_size=32, max_size=32)
)
U64 = st.integers(0, U64_MASK)
RELEASES = [".".join(map(str, form.since)) for form in FORMS]


def with_bytes(value: Any) -> Any:
    """Published values as they were before JSON: ``{"$hex": …}`` stands for bytes."""
    if isinstance(value, dict):
        return bytes.fromhex(value["$hex"]) if "$hex" in value else {key: with_bytes(v) for key, v in value.items()}
    return [with_bytes(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", publisher_capture_names())
def test_batches_are_byte_for_byte_what_the_release_publishes(name: str) -> None:
    capture = publisher_capture(name)
    compared = 0
    for session in capture["sessions"]:
        for case in session["cases"]:
            if "frames_hex" not in case:
                continue
            published = with_bytes(case["published"])
            rank = published.get("data_parallel_rank")
            made = encode_batch(
                published["ts"],
                published["events"],
                session["dp_rank"] if rank is None else rank,
                capture["vllm_version"],
            )
            assert made.hex() == case["frames_hex"][2]
            compared += 1
    assert compared >= 30


def low64(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & U64_MASK


@st.composite
def stored_events(draw: st.DrawFn) -> dict[str, Any]:
    hashes = draw(st.lists(HASHES, min_size=1, max_size=6, unique_by=low64))
    names = {low64(value) for value in hashes}
    block_size = draw(st.sampled_from([1, 4, 16]))
    count = len(hashes) * block_size
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": draw(st.none() | HASHES.filter(lambda value: low64(value) not in names)),
        "token_ids": draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)),
        "block_size": block_size,
        "lora_id": draw(st.none() | st.integers(0, 99)),
        "medium": draw(st.sampled_from(["GPU", "CPU", "cpu", "STORAGE", None])),
        "lora_name": draw(st.none() | st.text(min_size=1, max_size=8)),
        "group_idx": draw(st.none() | st.integers(0, 9)),
        "session_id": draw(st.none() | st.text(max_size=8)),
    }


TIERS = {"GPU": Tier.NPU, None: Tier.NPU, "CPU": Tier.CPU, "cpu": Tier.CPU, "STORAGE": Tier.DISK}


@given(stored_events(), st.sampled_from(RELEASES), st.integers(0, 63))
def test_what_was_stored_is_read_back_from_every_release(event: dict[str, Any], release: str, rank: int) -> None:
    batch = vllm.decode(encode_batch(1.5, [event], rank, release))
    assert batch.rejected == ()
    (decoded,) = batch.events
    assert isinstance(decoded, WireStored)
    form = form_of(release)
    assert batch.dp_rank == (rank if form.rank else None)
    assert decoded.hashes == tuple(low64(value) for value in event["block_hashes"])
    parent = event["parent_block_hash"]
    assert decoded.parent == (None if parent is None else low64(parent))
    assert list(decoded.token_ids) == event["token_ids"]
    assert decoded.block_size == event["block_size"]
    assert decoded.lora_id == event["lora_id"]
    assert decoded.tier is (TIERS[event["medium"]] if form.stored >= 6 else Tier.NPU)
    assert decoded.lora_name == (event["lora_name"] if form.stored >= 7 else None)
    assert decoded.group_idx == (event["group_idx"] if form.stored >= 9 else None)
    assert decoded.session_id == (event["session_id"] if form.stored >= 14 else None)


@given(st.lists(U64, min_size=1, max_size=9), st.sampled_from(RELEASES))
def test_removals_and_clears_are_read_back_from_every_release(hashes: list[int], release: str) -> None:
    events: list[dict[str, Any]] = [
        {"type": "BlockRemoved", "block_hashes": hashes, "medium": None},
        {"type": "AllBlocksCleared"},
    ]
    batch = vllm.decode(encode_batch(1.5, events, 0, release))
    assert batch.events == (WireRemoved(tuple(hashes), Tier.NPU), WireCleared(Tier.NPU))


def test_releases_without_events_and_events_without_fields_are_told() -> None:
    with pytest.raises(ValueError, match=r"0\.8\.5 publishes no KV events"):
        form_of("0.8.5")
    with pytest.raises(KeyError, match="token_ids"):
        encode_batch(1.0, [{"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}])
