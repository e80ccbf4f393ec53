"""extra_keys: adapter, salt and block keys told apart, and whatever is not understood never looks plain."""

import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.wire import vllm
from schemas.wire.extra_keys import Namespace, canonical_key, read_extra_keys
from schemas.wire.limits import DEFAULT_LIMITS, Limits
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason, WireStored


def read(
    extra_keys: Any,
    lora_name: str | None = None,
    starts_chain: bool = True,
    blocks: int = 2,
    limits: Limits | None = None,
) -> Namespace:
    raw = msgspec.Raw(extra_keys if isinstance(extra_keys, bytes) else msgspec.msgpack.encode(extra_keys))
    return read_extra_keys(raw, blocks, lora_name, starts_chain, limits or DEFAULT_LIMITS)


@pytest.mark.parametrize("nothing", [None, [], [None], [None, None], [[], []], [[]]])
def test_no_keys_are_the_plain_namespace(nothing: Any) -> None:
    assert read(nothing) == Namespace(None, None, ())
    assert read(nothing, "ad") == Namespace("ad", None, ())


@pytest.mark.parametrize(
    ("extra_keys", "lora_name", "expected"),
    [
        ([["ad"], ["ad"]], "ad", Namespace("ad", None, ())),
        ([["ad", "s"], ["ad"]], "ad", Namespace("ad", "s", ())),
        ([["s"], None], None, Namespace(None, "s", ())),
        ([["X"]], "X", Namespace("X", None, ())),
        ([["X", "X"]], "X", Namespace("X", "X", ())),
        ([["ad", ["i", 0], "s", b"\xff"], ["ad", ["i", -4]]], "ad", Namespace("ad", "s", (("i:0", "ff"), ("i:-4",)))),
        ([["img", "s"], ["img"]], None, Namespace(None, "s", (("img",), ("img",)))),
        ([[["lora", "ad", "/p"], ["cache_salt", "s"]], [["lora", "ad", "/p"]]], None, Namespace("ad", "s", ())),
        ([[["lora", "ad", "/p"], ["cache_salt", "s"]], [["lora", "ad", "/p"]]], "ad", Namespace("ad", "s", ())),
        ([[["cache_salt", "s"], "img"]], None, Namespace(None, "s", (("img",),))),
    ],
)  # fmt: skip
def test_adapter_salt_and_images_are_told_apart_in_a_chains_first_event(
    extra_keys: Any, lora_name: str | None, expected: Namespace
) -> None:
    assert read(extra_keys, lora_name) == expected


def test_a_bare_text_is_a_salt_in_the_first_block_of_a_chain_alone() -> None:
    assert read([None, ["x"]]) == Namespace(None, None, ((), ("x",)))
    assert read([["x"], None], starts_chain=False) == Namespace(None, None, (("x",), ()))


@pytest.mark.parametrize(
    ("extra_keys", "lora_name"),
    [
        ([None, [["cache_salt", "s"]]], None),
        ([[["cache_salt", "s"], ["cache_salt", "t"]]], None),
        ([[["cache_salt", ""]]], None),
        ([[""]], None),
        ([[["lora", "other", "/p"]]], "ad"),
        ([None, [["lora", "ad", "/p"]]], None),
        ([["other-name", ["img", 0]]], "ad"),
        ([[None]], None),
        ([[0]], None),
        ([[False]], None),
        ([[[]]], None),
        ([[b""]], None),
        ([[["a", "b", "c", 1]]], None),
    ],
)
def test_t28_what_is_not_understood_is_never_plain(extra_keys: Any, lora_name: str | None) -> None:
    namespace = read(extra_keys, lora_name)
    assert namespace.cache_salt or namespace.block_keys


KEY = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(), st.binary(), st.floats()),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.none() | st.lists(KEY, max_size=3), max_size=3), st.booleans())
def test_t28_no_key_ever_leaves_its_block_plain(extra_keys: list[list[Any] | None], starts_chain: bool) -> None:
    try:
        namespace = read(extra_keys, "adapter", starts_chain, blocks=3)
    except RefusedError:
        return
    for number, keys in enumerate(extra_keys):
        if [key for key in keys or () if key != "adapter"]:
            salted = number == 0 and starts_chain and namespace.cache_salt is not None
            assert salted or namespace.block_keys[number]


@pytest.mark.parametrize(
    ("extra_keys", "reason"),
    [
        (5, RejectReason.WRONG_TYPE),
        ("text", RejectReason.WRONG_TYPE),
        ({}, RejectReason.WRONG_TYPE),
        ([5], RejectReason.WRONG_TYPE),
        (["text"], RejectReason.WRONG_TYPE),
        ([[{"a": 1, 2: 3}]], RejectReason.WRONG_TYPE),
        ([[{b"a": 1}]], RejectReason.WRONG_TYPE),
        ([[msgspec.msgpack.Ext(5, b"x")]], RejectReason.WRONG_TYPE),
        ([[datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)]], RejectReason.WRONG_TYPE),
        (b"\x91\x91\xa2\xff\xfe", RejectReason.WRONG_TYPE),
        ([None, None, ["x"]], RejectReason.WRONG_SHAPE),
        (b"\x91\x91" + b"\x91" * 700 + b"\x01", RejectReason.LIMIT),
        (b"\x91\x91" + b"\x91" * 5000 + b"\x01", RejectReason.LIMIT),
        ([["k"] * 257], RejectReason.LIMIT),
        ([["k" * 4097]], RejectReason.LIMIT),
        ([["k" * 70_000]], RejectReason.LIMIT),
    ],
)
def test_t10_keys_without_a_canonical_text_refuse_their_event_and_nothing_else(
    extra_keys: Any, reason: RejectReason
) -> None:
    with pytest.raises(RefusedError) as caught:
        read(extra_keys)
    assert caught.value.reason is reason
    keys = msgspec.Raw(extra_keys) if isinstance(extra_keys, bytes) else extra_keys
    bad = ["BlockStored", [11, 12], None, [1, 2], 1, None, "GPU", None, keys]
    good = ["BlockStored", [13], 12, [3], 1, None, "GPU", None]
    if isinstance(extra_keys, bytes) and len(extra_keys) > 1000:
        return  # So deep that the message as a whole cannot be read: see test_wire_fuzz.
    batch = vllm.decode(msgspec.msgpack.encode([1.0, [bad, good], 0]))
    assert [refusal.reason for refusal in batch.rejected] == [reason]
    assert [event.hashes for event in batch.events if isinstance(event, WireStored)] == [(13,)]


def test_the_number_of_keys_of_an_event_is_limited() -> None:
    with pytest.raises(RefusedError) as caught:
        read([["a", "b"], ["c", "d"]], starts_chain=False, limits=Limits(hashes=3))
    assert caught.value.reason is RejectReason.LIMIT


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("img", "img"),
        (["img", 5], "img:5"),
        (b"\x01\xab", "01ab"),
        (7, "7"),
        (None, "null"),
        (True, "true"),
        (["img", True], '["img",true]'),
        (["a", ["b", b"\xff"], 1.5], '["a",["b","ff"],1.5]'),
    ],
)
def test_a_request_states_a_key_by_its_canonical_text(key: Any, text: str) -> None:
    assert canonical_key(key) == text
