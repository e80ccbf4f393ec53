"""vLLM events in every shape the field has sent; a bad one costs itself only."""

from typing import Any

import msgspec
import pytest

from schemas.blocks import Tier
from schemas.wire import vllm
from schemas.wire.limits import Limits
from schemas.wire.types import RejectReason, WireCleared, WireError, WireRemoved, WireStored

TOKENS = [1, 2, 3, 4]


def pack(events: list[Any], *rest: Any, timestamp: Any = 1000.0) -> bytes:
    return msgspec.msgpack.encode([timestamp, events, *rest])


def stored(**changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [11],
        "parent_block_hash": None,
        "token_ids": TOKENS,
    }
    event |= {"block_size": 4, "lora_id": None, "medium": "GPU"}
    return event | changes


def decode_one(event: Any) -> WireStored:
    batch = vllm.decode(pack([event], 0))
    assert batch.rejected == ()
    (decoded,) = batch.events
    assert isinstance(decoded, WireStored)
    return decoded


def refused(event: Any) -> RejectReason:
    """The reason; and the good event after it is applied."""
    batch = vllm.decode(pack([event, stored()], 0))
    assert len(batch.events) == 1
    (refusal,) = batch.rejected
    assert refusal.position == 0
    assert refusal.detail
    return refusal.reason


def test_ev_01_arrays_and_maps_may_be_mixed_in_one_batch() -> None:
    array = ["BlockStored", [11, 12], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None]
    batch = vllm.decode(pack([array, stored(block_hashes=[13], parent_block_hash=12)], 0))
    assert [event.hashes for event in batch.events] == [(11, 12), (13,)]  # type: ignore[union-attr]
    assert batch.events[1].parent == 12  # type: ignore[union-attr]
    assert batch.rejected == ()


def test_ev_02_trailing_fields_may_be_missing_or_unknown() -> None:
    short = decode_one(["BlockStored", [11], None, TOKENS, 4, None])
    assert short.tier is Tier.NPU
    long = ["BlockStored", [12], 11, TOKENS, 4, None, "GPU", None, [[]], 0, "full_attention", None]
    long += [None, None, None, "future-field", {"x": 1}]
    batch = vllm.decode(msgspec.msgpack.encode([1000.0, [long], 0, "future-batch-field"]))
    assert batch.rejected == ()
    assert batch.events[0].hashes == (12,)  # type: ignore[union-attr]
    assert decode_one(stored(locality="LOCAL", brand_new={"a": [1]})).locality == "LOCAL"


def test_every_position_of_the_newest_array_form_is_read() -> None:
    event = ["BlockStored", [7], 6, TOKENS, 4, 3, "CPU", "ad", [["ad", ["img", 5]]], 1, "mla_attention", 128]
    event += ["REMOTE", "tier-fs", "sess", [9]]
    decoded = decode_one(event)
    assert (decoded.parent, decoded.lora_id, decoded.tier, decoded.lora_name) == (6, 3, Tier.CPU, "ad")
    assert (decoded.group_idx, decoded.spec_kind, decoded.sliding_window) == (1, "mla_attention", 128)
    assert (decoded.locality, decoded.ownership, decoded.session_id) == ("REMOTE", "tier-fs", "sess")
    assert decoded.block_keys == (("img:5",),)


@pytest.mark.parametrize("rank", [None, 3])
def test_both_orders_of_the_batch_are_understood(rank: int | None) -> None:
    usual = vllm.decode(msgspec.msgpack.encode([1.5, [stored()], rank]))
    other = vllm.decode(msgspec.msgpack.encode([1.5, rank, [stored()]]))
    assert usual == other
    assert (usual.timestamp, usual.dp_rank) == (1.5, rank)
    assert vllm.decode(msgspec.msgpack.encode([1.5, [stored()]])).dp_rank is None


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (bytes(range(8)), 0x0001020304050607),
        (bytes(24) + bytes(range(8)), 0x0001020304050607),
        (bytes(8) + bytes(range(8)), 0x0001020304050607),
        ("0x2A", 42),
        ("ff", 255),
        ("42", 42),
        ("18446744073709551615", 2**64 - 1),
        ("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 12975151322591401389),
    ],
)
def test_ev_05_hashes_in_every_form_become_their_low_64_bits_for_stores_parents_and_removals(
    wire: Any, expected: int
) -> None:
    assert decode_one(stored(block_hashes=[wire])).hashes == (expected,)
    other = 5 if isinstance(wire, int) else ("5" if isinstance(wire, str) else bytes(31) + b"\x05")
    assert decode_one(stored(block_hashes=[other], parent_block_hash=wire)).parent == expected
    (removed,) = vllm.decode(pack([{"type": "BlockRemoved", "block_hashes": [wire], "medium": "GPU"}], 0)).events
    assert removed == WireRemoved((expected,), Tier.NPU)


def test_integers_and_bytes_may_be_mixed_in_one_list() -> None:
    mixed = [1, bytes(31) + b"\x02", -3, bytes(15) + b"\x04"]
    assert decode_one(stored(block_hashes=mixed, token_ids=[])).hashes == (1, 2, 2**64 - 3, 4)


def test_sq_11_skipped_fields_are_tolerated_and_bridge_nothing() -> None:
    event = stored(block_hashes=[1792], parent_block_hash=1664, token_ids=[13, 14, 15, 16])
    event |= {"skipped_parent_block_hash": 1536, "skipped_token_ids": [9, 10, 11, 12]}
    decoded = decode_one(event)
    assert (decoded.hashes, decoded.parent, list(decoded.token_ids)) == ((1792,), 1664, [13, 14, 15, 16])


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, 4, 5], [1]])
def test_t24_partial_and_misaligned_blocks_are_refused(tokens: list[int]) -> None:
    assert refused(stored(token_ids=tokens)) is RejectReason.TOKEN_COUNT
    assert refused(stored(token_ids=tokens, block_size=0)) is RejectReason.TOKEN_COUNT


@pytest.mark.parametrize(
    "bad", [b"", b"\x00", bytes(7), bytes(65), "", "xyz", "0x", "99999999999999999999", None, "-5", " 42", "42 "]
)
def test_ev_05_hashes_that_name_nothing_are_refused(bad: Any) -> None:
    assert refused(stored(block_hashes=[bad])) is RejectReason.BAD_HASH
    if bad is not None:
        assert refused(stored(parent_block_hash=bad)) is RejectReason.BAD_HASH


def test_ev_10_the_tag_may_be_anywhere_and_unknown_or_missing_tags_cost_one_event() -> None:
    last = {**{key: value for key, value in stored().items() if key != "type"}, "type": "BlockStored"}
    assert decode_one(last).hashes == (11,)
    assert refused({"block_hashes": [12]}) is RejectReason.UNKNOWN_EVENT
    assert refused({"type": "BlockMoved", "block_hashes": [11]}) is RejectReason.UNKNOWN_EVENT
    assert refused(["BlockMoved", [11]]) is RejectReason.UNKNOWN_EVENT
    assert refused({1: 2}) is RejectReason.UNKNOWN_EVENT
    assert refused([]) is RejectReason.UNKNOWN_EVENT
    assert refused([5, 6]) is RejectReason.UNKNOWN_EVENT


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(block_hashes="bad"), RejectReason.WRONG_TYPE),
        (stored(block_hashes=[1.5]), RejectReason.WRONG_TYPE),
        (stored(block_hashes=[[1]]), RejectReason.WRONG_TYPE),
        (stored(block_hashes=[bytes(8), "ff"], token_ids=[]), RejectReason.WRONG_TYPE),
        (stored(parent_block_hash=[1]), RejectReason.WRONG_TYPE),
        (stored(parent_block_hash=1.5), RejectReason.WRONG_TYPE),
        (stored(token_ids="tokens"), RejectReason.WRONG_TYPE),
        (stored(token_ids=[1, 2, 3, "x"]), RejectReason.WRONG_TYPE),
        (stored(block_size="4"), RejectReason.WRONG_TYPE),
        (stored(block_size=-4), RejectReason.WRONG_TYPE),
        (stored(medium=7), RejectReason.WRONG_TYPE),
        (stored(extra_keys=5), RejectReason.WRONG_TYPE),
        (stored(block_hashes=[]), RejectReason.NO_HASHES),
        (stored(medium="tape"), RejectReason.UNKNOWN_MEDIUM),
        (stored(token_ids=[1, 2, 3, -1]), RejectReason.BAD_TOKEN),
        (stored(token_ids=[1, 2, 3, 2**32]), RejectReason.BAD_TOKEN),
        (["BlockStored"], RejectReason.MISSING_FIELD),
        (["BlockStored", [11]], RejectReason.MISSING_FIELD),
        (["BlockStored", [11], None, TOKENS], RejectReason.MISSING_FIELD),
        (
            {"type": "BlockStored", "block_hashes": [11], "token_ids": TOKENS, "block_size": 4},
            RejectReason.MISSING_FIELD,
        ),
        ({"type": "BlockStored"}, RejectReason.MISSING_FIELD),
        ({"type": "BlockRemoved"}, RejectReason.MISSING_FIELD),
        (7, RejectReason.WRONG_SHAPE),
        (None, RejectReason.WRONG_SHAPE),
        ("BlockStored", RejectReason.WRONG_SHAPE),
    ],
)
def test_t10_a_bad_event_costs_itself_only(event: Any, reason: RejectReason) -> None:
    assert refused(event) is reason


def test_ex_03_the_same_hash_twice_and_a_block_that_is_its_own_parent_are_refused() -> None:
    twice = stored(block_hashes=[13, 13], token_ids=[*TOKENS, *TOKENS])
    assert refused(twice) is RejectReason.DUPLICATE_HASH
    assert refused(stored(parent_block_hash=11)) is RejectReason.SELF_PARENT


def test_hy_01_tokens_that_do_not_fill_the_blocks_are_refused_in_either_order() -> None:
    twelve = list(range(1, 13))
    mamba = stored(block_hashes=[501], token_ids=twelve, group_idx=0, kv_cache_spec_kind="mamba")
    main = stored(block_hashes=[501, 502, 503], token_ids=twelve, group_idx=3, kv_cache_spec_kind="mla_attention")
    for events in ([mamba, main], [main, mamba]):
        batch = vllm.decode(pack(events, 0))
        assert [event.hashes for event in batch.events] == [(501, 502, 503)]  # type: ignore[union-attr]
        assert [refusal.reason for refusal in batch.rejected] == [RejectReason.NON_MAIN_ATTENTION]
    assert refused(stored(block_hashes=[501], token_ids=twelve)) is RejectReason.TOKEN_COUNT


@pytest.mark.parametrize(
    "kind", ["full_attention", "mla_attention", "sink_full_attention", "FullAttention", None, "new"]
)
def test_main_and_unknown_attention_kinds_are_kept(kind: str | None) -> None:
    assert decode_one(stored(kv_cache_spec_kind=kind)).spec_kind == kind


@pytest.mark.parametrize(
    "kind",
    [
        "sliding_window",
        "SlidingWindowMLA",
        "mamba",
        "chunked_local_attention",
        "encoder_only_attention",
        "cross_attention",
    ],
)
def test_t25_other_attention_kinds_are_refused(kind: str) -> None:
    assert refused(stored(kv_cache_spec_kind=kind)) is RejectReason.NON_MAIN_ATTENTION


def test_hy_02_a_removal_in_another_group_leaves_the_main_group_alone() -> None:
    groups = vllm.GroupFilter()
    main = stored(group_idx=0, kv_cache_spec_kind="full_attention")
    window = stored(group_idx=1, kv_cache_spec_kind="sliding_window")
    groups.apply(vllm.decode(pack([main, window], 0)))

    def removal(group: int | None) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": group}

    batch = groups.apply(vllm.decode(pack([removal(1), removal(0), removal(None)], 0)))
    assert [event.group_idx for event in batch.events] == [0, None]  # type: ignore[union-attr]
    assert [refusal.reason for refusal in batch.rejected] == [RejectReason.NON_MAIN_ATTENTION]


def test_all_blocks_cleared_is_never_filtered_and_means_the_npu_alone() -> None:
    for event in ({"type": "AllBlocksCleared"}, ["AllBlocksCleared"]):
        assert vllm.decode(pack([event], 0)).events == (WireCleared(tier=Tier.NPU),)


def test_offload_events_without_tokens_and_size_are_tier_changes() -> None:
    decoded = decode_one(stored(block_hashes=[11, 12], token_ids=[], block_size=0, medium="CPU"))
    assert (decoded.hashes, len(decoded.token_ids), decoded.block_size, decoded.tier) == ((11, 12), 0, 0, Tier.CPU)


def test_ha_05_the_adapter_name_in_extra_keys_is_no_salt_and_no_image() -> None:
    plain = decode_one(stored(lora_name="adapter-116", lora_id=117, extra_keys=[["adapter-116"]]))
    assert (plain.lora_name, plain.cache_salt, plain.block_keys) == ("adapter-116", None, ())
    salted = decode_one(stored(lora_name="adapter-116", extra_keys=[["adapter-116", "salt-1"]]))
    assert (salted.lora_name, salted.cache_salt, salted.block_keys) == ("adapter-116", "salt-1", ())


def test_ha_04_a_salt_is_a_salt_where_no_adapter_is_named() -> None:
    assert decode_one(stored(extra_keys=[["X"]])).cache_salt == "X"
    later = decode_one(stored(parent_block_hash=5, extra_keys=[["image"]]))
    assert (later.cache_salt, later.block_keys) == (None, (("image",),))


def test_tagged_extra_keys_are_what_they_say() -> None:
    keys = [[["lora", "ad", "/path"], ["cache_salt", "s"], ["img", 3]]]
    decoded = decode_one(stored(extra_keys=keys))
    assert (decoded.lora_name, decoded.cache_salt, decoded.block_keys) == ("ad", "s", (("img:3",),))


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", RejectReason.NOT_MSGPACK),
        (b"\xc1", RejectReason.WRONG_SHAPE),
        (b"\x93\x01", RejectReason.NOT_MSGPACK),
        (msgspec.msgpack.encode({"events": []}), RejectReason.WRONG_SHAPE),
        (msgspec.msgpack.encode([1.0]), RejectReason.WRONG_SHAPE),
        (msgspec.msgpack.encode([1.0, 2, 3]), RejectReason.WRONG_SHAPE),
        (msgspec.msgpack.encode([1.0, [None] * 65_537, 0]), RejectReason.LIMIT),
    ],
)
def test_a_message_that_is_no_batch_is_refused_as_a_whole(payload: bytes, reason: RejectReason) -> None:
    with pytest.raises(WireError) as caught:
        vllm.decode(payload)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(payload_bytes=10), RejectReason.TOO_LARGE), (Limits(events=1), RejectReason.LIMIT)],
)
def test_a_message_above_its_limits_is_refused_as_a_whole(limits: Limits, reason: RejectReason) -> None:
    with pytest.raises(WireError) as caught:
        vllm.decode(pack([stored(), stored()], 0), limits)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("limits", "event"),
    [
        (Limits(hashes=1), stored(block_hashes=[1, 2], token_ids=[])),
        (Limits(hashes=1), {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU"}),
        (Limits(tokens=3), stored()),
        (Limits(block_keys=1), stored(extra_keys=[["a", "b"]])),
        (Limits(depth=1), stored(extra_keys=[[["a", ["b", 1, [2]]]]])),
        (Limits(text=2), stored(lora_name="abc")),
        (Limits(text=2), stored(extra_keys=[["abc"]])),
        (Limits(text=2), stored(extra_keys=[[["abc", 1]]])),
        (Limits(text=2), stored(kv_cache_spec_kind="abc")),
    ],
)
def test_every_limit_refuses_the_one_event_above_it(limits: Limits, event: dict[str, Any]) -> None:
    small = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    batch = vllm.decode(pack([event, small], 0), limits)
    assert [refusal.reason for refusal in batch.rejected] == [RejectReason.LIMIT]
    assert len(batch.events) == 1
    assert vllm.decode(pack([event], 0)).rejected == ()


def test_the_default_limits_are_in_force() -> None:
    assert refused(stored(block_hashes=list(range(65_537)), token_ids=[])) is RejectReason.LIMIT
    assert refused(stored(group_idx=1024)) is RejectReason.LIMIT
    assert refused(stored(lora_name="x" * 5000)) is RejectReason.LIMIT
    assert refused(stored(extra_keys=[["k"] * 257])) is RejectReason.LIMIT
    assert refused(stored(extra_keys=[["k" * 2_000_000]])) is RejectReason.LIMIT


def test_milliseconds_and_odd_timestamps_are_normalised() -> None:
    assert vllm.decode(pack([], 0, timestamp=1753868745000)).timestamp == 1753868745.0
    assert vllm.decode(pack([], 0, timestamp="soon")).timestamp == 0.0
    assert vllm.decode(pack([], 0, timestamp=float("nan"))).timestamp == 0.0
