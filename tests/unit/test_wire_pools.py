"""Pool batches: memcache, Mooncake, YuanRong; text hashes by each publisher's rule."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import Tier
from schemas.wire import memcache, mooncake, vllm, yuanrong
from schemas.wire.hashes import BadHashError, memcache_text, object_key_text, plain_text
from schemas.wire.types import RejectReason, WireCleared, WireError, WireRemoved, WireStored

DIGEST = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
LOW = 12975151322591401389


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234567890123456", 0x1234567890123456),
        ("0x1234567890123456", 0x1234567890123456),
        ("00000000000000ff", 255),
        (DIGEST, LOW),
        (DIGEST.upper(), LOW),
        ("0" * 64, 0),
    ],
)
def test_memcache_text_is_hex_of_16_or_64_digits_even_when_all_are_decimal(text: str, value: int) -> None:
    assert memcache_text(text) == value


@pytest.mark.parametrize("text", ["", "ff", "1" * 15, "1" * 17, "1" * 32, "g" * 16, "1" * 63, "0x", "12345678901234-6"])
def test_other_memcache_text_is_refused(text: str) -> None:
    with pytest.raises(BadHashError):
        memcache_text(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("1234567890123456", 1234567890123456),
        ("18446744073709551615", 2**64 - 1),
        ("0x9000000000000001", 0x9000000000000001),
        ("0xFF", 255),
        (f"model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{DIGEST}", LOW),
        ("model@tp_rank:0@1234567890123456", 0x1234567890123456),
        (f"m@0x{DIGEST}", LOW),
    ],
)
def test_a_mooncake_object_key_is_decimal_or_0x_hex_or_ends_in_a_digest(text: str, value: int) -> None:
    assert object_key_text(text) == value


@pytest.mark.parametrize(
    "text", ["", "ff", "18446744073709551616", "0x", "model@", "model@ff", "a@b", "-1", "m@" + "g" * 16]
)
def test_other_object_keys_are_refused(text: str) -> None:
    with pytest.raises(BadHashError):
        object_key_text(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), ("0x42", 0x42), ("4a", 0x4A), ("0X2A", 42), ("1" * 16, 1111111111111111), (DIGEST, LOW)],
)
def test_elsewhere_0x_or_a_letter_means_hex_and_digits_mean_decimal(text: str, value: int) -> None:
    assert plain_text(text) == value


@pytest.mark.parametrize("text", ["", "1" * 21, "99999999999999999999", "zz", "0xzz", "0x", "a" * 129])
def test_elsewhere_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadHashError):
        plain_text(text)


def meta(event_type: str, hashes: tuple[Any, ...] = (7,), **changes: Any) -> memcache.MetaEvent:
    values: dict[str, Any] = {"event_id": 1, "timestamp": 1_700_000_000_000, "event_type": event_type}
    values |= {"backend_id": "10.0.0.5", "medium": "cpu", "seq_hashes": hashes, "model_name": "m", "block_size": 16}
    return memcache.MetaEvent(**(values | changes))


def test_memcache_events_have_15_13_and_11_keys_and_decode_to_what_was_sent() -> None:
    payload = memcache.encode_batch([meta("stored"), meta("removed"), meta("cleared")])
    assert [len(event) for event in msgspec.msgpack.decode(payload)["events"]] == [15, 13, 11]
    batch = memcache.decode(payload)
    where: dict[str, Any] = {"backend_id": "10.0.0.5", "model": "m", "tenant": "default"}
    stored, removed, cleared = batch.events
    assert isinstance(stored, WireStored)
    assert (stored.hashes, stored.tier, stored.block_size, stored.backend_id) == ((7,), Tier.CPU, 16, "10.0.0.5")
    assert removed == WireRemoved((7,), Tier.CPU, **where)
    assert cleared == WireCleared(Tier.CPU, **where)
    assert batch.timestamp == 1_700_000_000.0


@pytest.mark.parametrize(("wire", "value"), [(LOW, LOW), (DIGEST, LOW), ("1234567890123456", 0x1234567890123456)])
def test_memcache_hashes_may_be_ints_or_hex_text(wire: Any, value: int) -> None:
    (event,) = memcache.decode(memcache.encode_batch([meta("stored", (wire,))])).events
    assert event.hashes == (value,)  # type: ignore[union-attr]


@pytest.mark.parametrize(("medium", "tier"), [("xpu", Tier.NPU), ("cpu", Tier.CPU), ("DISK", Tier.DISK), (None, None)])
def test_memcache_media_are_tiers_and_a_missing_one_stays_open(medium: str | None, tier: Tier | None) -> None:
    (event,) = memcache.decode(memcache.encode_batch([meta("cleared", medium=medium)])).events
    assert event.tier is tier


def test_a_pools_payload_is_dispatched_by_its_first_byte() -> None:
    assert memcache.is_batch(memcache.encode_batch([]))
    assert memcache.is_batch(b"\xde\x00\x00")
    assert memcache.is_batch(b"\xdf\x00\x00\x00\x00")
    assert not memcache.is_batch(mooncake.encode_batch(1, []))
    assert not memcache.is_batch(b"\xdc\x00\x00")
    assert not memcache.is_batch(b"")


def pool_refused(event: dict[str, Any]) -> RejectReason:
    good = {"event_type": "removed", "seq_hashes": [1], "medium": "cpu", "backend_id": "b"}
    batch = memcache.decode(msgspec.msgpack.encode({"events": [event, good]}))
    assert len(batch.events) == 1
    (refusal,) = batch.rejected
    return refusal.reason


def test_t20_the_type_comes_first_so_a_clear_needs_no_hashes_and_an_unknown_type_is_no_clear() -> None:
    cleared = {"event_type": "cleared", "seq_hashes": [], "backend_id": "b"}
    (event,) = memcache.decode(msgspec.msgpack.encode({"events": [cleared]})).events
    assert event == WireCleared(None, backend_id="b")
    for unknown in ("flushed", "CLEARED", "not_cleared", "cleared ", "", "KVCleared"):
        assert pool_refused({"event_type": unknown, "seq_hashes": [1]}) is RejectReason.UNKNOWN_EVENT
    assert pool_refused({"seq_hashes": [1]}) is RejectReason.UNKNOWN_EVENT


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"event_type": "stored", "seq_hashes": []}, RejectReason.NO_HASHES),
        ({"event_type": "stored"}, RejectReason.NO_HASHES),
        ({"event_type": "stored", "seq_hashes": ["12"]}, RejectReason.BAD_HASH),
        ({"event_type": "stored", "seq_hashes": [None]}, RejectReason.BAD_HASH),
        ({"event_type": "stored", "seq_hashes": "x"}, RejectReason.WRONG_TYPE),
        ({"event_type": "stored", "seq_hashes": [1], "medium": "tape"}, RejectReason.UNKNOWN_MEDIUM),
        ({"event_type": "stored", "seq_hashes": [1], "backend_id": 5}, RejectReason.WRONG_TYPE),
        ({"event_type": "stored", "seq_hashes": [1], "backend_id": "x" * 5000}, RejectReason.LIMIT),
        ({"event_type": "stored", "seq_hashes": [1], "parent_hash": 1}, RejectReason.SELF_PARENT),
        ({"event_type": 5}, RejectReason.WRONG_TYPE),
        (["stored", 1], RejectReason.WRONG_SHAPE),
    ],
)
def test_a_bad_pool_event_costs_itself_only(event: Any, reason: RejectReason) -> None:
    assert pool_refused(event) is reason


def test_ev_09_a_mooncake_event_with_its_hash_given_twice_is_one_block() -> None:
    event = {
        "event_id": 1, "timestamp": 1753868745000, "event_type": "stored", "type": "BlockStored", "model_name": None,
        "block_size": None, "additional_salt": None, "lora_name": None, "tenant_id": "default", "backend_id": "node-1",
        "group_id": None, "medium": "cpu", "dp_rank": None, "object_key": "0x9000000000000001",
        "seq_hashes": [10376293541461622785], "block_hashes": [-8070450532247928831], "base_block_idx": 0,
        "parent_hash": None, "token_ids": None, "parent_block_hash": None,
    }  # fmt: skip
    batch = mooncake.decode(mooncake.encode_batch(1753868745000, [event]))
    (stored,) = batch.events
    assert isinstance(stored, WireStored)
    assert (stored.hashes, stored.block_size, stored.parent, stored.backend_id) == (
        (0x9000000000000001,),
        0,
        None,
        "node-1",
    )
    assert batch.timestamp == 1753868745.0


def test_ev_06_a_pool_names_a_block_by_the_low_64_bits_of_the_engines_digest() -> None:
    digest = bytes.fromhex("aa" * 24 + "0102030405060708")
    engine: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [digest],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
    }
    engine |= {"block_size": 4, "medium": "GPU"}
    pool: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [72623859790382856],
        "parent_block_hash": None,
        "token_ids": [],
    }
    pool |= {"block_size": 0, "medium": "SHARED_STORAGE"}
    (on_npu,) = vllm.decode(msgspec.msgpack.encode([1000.0, [engine], 0])).events
    (in_pool,) = mooncake.decode(mooncake.encode_batch(1, [pool])).events
    assert isinstance(on_npu, WireStored)
    assert isinstance(in_pool, WireStored)
    assert on_npu.hashes == in_pool.hashes == (0x0102030405060708,)
    assert (on_npu.tier, in_pool.tier) == (Tier.NPU, Tier.DISK)


def test_legacy_type_names_and_block_hashes_alone_are_understood() -> None:
    events: list[dict[str, Any]] = [
        {"type": "BlockStored", "block_hashes": [-1], "medium": "cpu", "backend_id": "n"},
        {"type": "BlockRemoved", "block_hashes": [5], "medium": "disk", "backend_id": "n"},
        {"event_type": "stored", "object_key": "17", "medium": "cpu", "backend_id": "n"},
    ]
    batch = mooncake.decode(mooncake.encode_batch(1, events))
    assert [event.hashes for event in batch.events] == [(2**64 - 1,), (5,), (17,)]  # type: ignore[union-attr]


def test_yuanrong_reads_pool_keys_and_plain_hashes() -> None:
    hashes = [f"t@m@{DIGEST}", "ff", "42"]
    events = [{"event_type": "stored", "seq_hashes": [text], "medium": "cpu", "backend_id": "n"} for text in hashes]
    batch = yuanrong.decode(mooncake.encode_batch(1, events))
    assert [event.hashes for event in batch.events] == [(LOW,), (255,), (42,)]  # type: ignore[union-attr]


@pytest.mark.parametrize("decode", [memcache.decode, mooncake.decode, yuanrong.decode])
@given(payload=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_wire_errors(decode: Any, payload: bytes) -> None:
    with contextlib.suppress(WireError):
        assert decode(payload).timestamp >= 0
