"""Hostile bytes: nothing but WireError comes out, and memory stays flat."""

import contextlib
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.wire import memcache, mooncake, vllm, yuanrong
from schemas.wire.frames import parse_live, parse_replay
from schemas.wire.types import WireError
from tests.captures import pool_capture, publisher_capture

DECODERS = [vllm.decode, memcache.decode, mooncake.decode, yuanrong.decode]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(SCALARS.filter(bool), inner, max_size=5)),
    max_leaves=25,
)
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "removed", "cleared"])
FIELDS = st.sampled_from(
    ["type", "event_type", "block_hashes", "seq_hashes", "parent_block_hash", "token_ids", "block_size", "medium",
     "extra_keys", "backend_id", "object_key", "group_idx", "lora_name", "kv_cache_spec_kind"]
)  # fmt: skip
EVENTS = st.one_of(
    VALUES, st.dictionaries(FIELDS, st.one_of(TAGS, VALUES)), st.lists(st.one_of(TAGS, VALUES), max_size=9)
)

GOOD: dict[str, object] = {
    "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
    "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None, "group_idx": None,
    "kv_cache_spec_kind": None, "kv_cache_spec_sliding_window": None, "locality": None, "ownership": None,
    "session_id": None, "lookahead_token_ids": None,
}  # fmt: skip
SPOILT = st.dictionaries(st.sampled_from(sorted(GOOD)), VALUES, min_size=1, max_size=3)


def decode_all(payload: bytes) -> int:
    refused = 0
    for decode in DECODERS:
        try:
            decode(payload)
        except WireError:
            refused += 1
    return refused


@given(st.binary(max_size=300))
def test_arbitrary_bytes(payload: bytes) -> None:
    assert 0 <= decode_all(payload) <= 4


@given(st.lists(EVENTS, max_size=6), SCALARS)
def test_arbitrary_values_in_the_shape_of_batches(events: list[object], rank: object) -> None:
    assert decode_all(msgspec.msgpack.encode([1.0, events, rank])) >= 1
    assert decode_all(msgspec.msgpack.encode({"events": events})) >= 3


@given(SPOILT)
def test_a_spoilt_event_is_read_or_refused_and_the_one_after_it_is_read(changes: dict[str, object]) -> None:
    event = GOOD | changes
    for spoilt in (event, list(event.values())):
        batch = vllm.decode(msgspec.msgpack.encode([1.0, [spoilt, GOOD], 0]))
        assert len(batch.events) + len(batch.rejected) == 2
        assert batch.events[-1].hashes == (11, 12)  # type: ignore[union-attr]


@given(st.dictionaries(st.sampled_from(["event_type", "seq_hashes", "parent_hash", "token_ids", "medium"]), VALUES))
def test_a_spoilt_pool_event_is_read_or_refused_and_the_one_after_it_is_read(changes: dict[str, object]) -> None:
    good: dict[str, object] = {"event_type": "stored", "seq_hashes": [7], "medium": "cpu", "backend_id": "n"}
    for decode in (memcache.decode, mooncake.decode, yuanrong.decode):
        events = [good | changes, good]
        payload = {"events": events} if decode is memcache.decode else [1, events, 0]
        batch = decode(msgspec.msgpack.encode(payload))
        assert len(batch.events) + len(batch.rejected) == 2
        assert batch.events[-1].hashes == (7,)  # type: ignore[union-attr]


@given(st.lists(st.binary(max_size=12), max_size=6))
def test_arbitrary_frames(frames: list[bytes]) -> None:
    for parse in (parse_live, parse_replay):
        with contextlib.suppress(WireError):
            assert parse(frames)


def captured_payloads() -> list[bytes]:
    payloads = [bytes.fromhex(pool_capture("memcache-1.3.0_cleared")["frames_hex"][0][2])]
    for name in ("vllm-0.20.2", "vllm-0.33.0"):
        cases = publisher_capture(name)["sessions"][0]["cases"]
        payloads.extend(bytes.fromhex(case["frames_hex"][2]) for case in cases if "frames_hex" in case)
    return payloads


def mutate(payload: bytes, chance: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(chance.randint(1, 6)):
        kind, place = chance.randrange(4), chance.randrange(len(data) or 1)
        if kind == 0 and data:
            data[place] = chance.randrange(256)
        elif kind == 1:
            data[place:place] = chance.randbytes(chance.randint(1, 4))
        elif kind == 2:
            del data[place : place + chance.randint(1, 4)]
        else:
            data[place:place] = chance.choice(
                [b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf\x00\xff\xff\xff"]
            )
    return bytes(data)


def test_mutated_captures_never_crash_and_memory_stays_flat() -> None:
    chance = random.Random(7)
    payloads = captured_payloads()
    for payload in payloads:
        decode_all(mutate(payload, chance))
    tracemalloc.start()
    sizes = []
    for _ in range(5):
        for _ in range(4000):
            decode_all(mutate(chance.choice(payloads), chance))
        sizes.append(tracemalloc.get_traced_memory()[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The first rounds fill caches of the interpreter and of the decoders.
    assert sizes[-1] - sizes[1] < 64 * 1024
    assert peak < 16 * 1024 * 1024


def deep_events(depth: int) -> list[bytes]:
    nested = b"\x91" * depth + b"\xc0"
    stored = b"\xabBlockStored\x91\x05\xc0\xc0\x00\xc0\xc0\xc0"
    return [
        nested,
        b"\x99" + stored + b"\x91\x91" + nested,
        b"\x9b" + stored + b"\xc0\xc0" + nested,
        b"\x82\xa4type\xa7unknown\xa1x" + nested,
        b"\x82\xaaevent_type\xa7cleared\xa1x" + nested,
    ]


@pytest.mark.parametrize("depth", [*range(1, 20), 100, *range(850, 1010, 3), 5000, 100_000])
def test_lists_in_lists_are_refused_or_skipped_at_every_depth(depth: int) -> None:
    assert decode_all(b"\x91" * depth + b"\xc0") == 4
    for event in deep_events(depth):
        assert decode_all(b"\x93\xc0\x91" + event + b"\x00") >= 1
        assert decode_all(b"\x81\xa6events\x91" + event) >= 3


def test_lengths_beyond_the_payload_cost_no_memory() -> None:
    tracemalloc.start()
    for head in (
        b"\xdd\x7f\xff\xff\xff",
        b"\x93\xc0\xdd\x7f\xff\xff\xff",
        b"\x93\xc0\x91\x92\xab" + b"BlockStored" + b"\xdd\x7f\xff\xff\xff",
    ):
        assert decode_all(head) == 4
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 1024 * 1024
