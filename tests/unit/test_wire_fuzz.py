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
    assert sizes[-1] - sizes[1] < 64 * 1024
    assert peak < 16 * 1024 * 1024


@pytest.mark.parametrize("depth", [100, 5000, 100_000])
def test_deep_nesting_is_refused_or_skipped(depth: int) -> None:
    nested = b"\x91" * depth + b"\xc0"
    assert decode_all(nested) == 4
    batch = b"\x93\xc0\x91" + nested + b"\x00"
    assert decode_all(batch) >= 1


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
