"""Large bodies cost what a good body of their size costs, whatever is in them."""

import time
import tracemalloc
from typing import Any

import msgspec
import orjson
import pytest

from services.coordinator.frontdoor.prompts import CHAT, RequestRefusedError, read_prompt
from services.router.encodings import BodyRefusedError, Encoding, decode_body
from services.runtime.bounded_bodies import LARGE_BYTES

MIB = 1024 * 1024
QUERY: dict[str, Any] = {"model": "m", "block_size": 4, "tenant_id": "t"}
EVENT: dict[str, Any] = {"event_id": 1, "event_type": "stored", "block_hashes": [2**64 - 1], "block_size": 4}


def encoded(body: dict[str, Any], encoding: Encoding) -> bytes:
    return orjson.dumps(body) if encoding == "json" else msgspec.msgpack.encode(body)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(
    "body",
    [
        QUERY | {"token_ids": list(range(1_000_000))},
        QUERY | {"token_ids": list(range(300_000)), "block_extra_keys": {str(n): ["image"] for n in range(900)}},
        QUERY | {"block_hashes": [2**64 - 1 - n for n in range(200_000)], "unknown": ["x"] * 300_000},
        {"instance_id": "a", "events": [EVENT | {"token_ids": [n] * 4} for n in range(20_000)]},
        {"instance_id": "a", "events": [EVENT | {"token_ids": list(range(n, n + 4000))} for n in range(300)]},
        {"instance_id": "a", "events": [{"event_id": 1, "data": EVENT | {"blocks": [{"block_hash": 1}]}}] * 40_000},
    ],
)  # fmt: skip
def test_good_bodies_of_every_size_are_read_unchanged(body: dict[str, Any], encoding: Encoding) -> None:
    packed = encoded(body, encoding)
    assert len(packed) > LARGE_BYTES
    assert decode_body(packed, encoding, "query") == body


HEAD = b"\x82\xa5model\xa1m\xa9token_ids"  # {"model": "m", "token_ids": ...


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("json", b'{"model":"m","token_ids":[[]' + b",[]" * 3_000_000 + b"]}"),
        ("json", b'{"model":"m","x":[' + b"{}," * 3_000_000 + b"{}]}"),
        ("json", b'{"a":1' + b"".join(b',"%d":1' % n for n in range(2_100_000)) + b"}"),
        ("json", b'{"model":"m","x":["' + b'","' * 8_400_000 + b'"]}'),
        ("msgpack", HEAD + b"\xdd" + (10_000_000).to_bytes(4, "big") + b"\x90" * 10_000_000),
        ("msgpack", HEAD + b"\xdd" + (60_000).to_bytes(4, "big") + (b"\xdc\x00\xc8" + b"\x80" * 200) * 60_000),
        ("msgpack", HEAD + b"\xdd" + (10_000).to_bytes(4, "big") + (b"\x81\xa1x\xdc\x00\xc8" + b"\x90" * 200) * 10_000),
        ("msgpack", b"\xdf" + (262_144).to_bytes(4, "big") + b"".join(b"\xa5%05x\x01" % n for n in range(262_144))),
    ],
)  # fmt: skip
def test_bodies_that_would_become_far_more_than_they_are_cost_neither_memory_nor_time(
    encoding: Encoding, body: bytes
) -> None:
    assert len(body) > LARGE_BYTES
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(BodyRefusedError, match=r"send less at once|at most 1000 are read") as refused:
        decode_body(body, encoding, "query")
    took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.status == 413
    assert took < 2.0  # under tracemalloc; unbounded it takes ten times as long
    assert peak < 100 * MIB + len(body)


@pytest.mark.parametrize(
    "body", [b"\xdd\x00\x20\x00\x00" + b"\x01" * 2_097_152, b"\xdf\x00\x00\x00\x02" + b"\x01" * 2_000_000]
)
def test_large_msgpack_that_is_no_map_of_texts_is_refused_as_such(body: bytes) -> None:
    with pytest.raises(BodyRefusedError, match=r"object of fields|not msgpack"):
        decode_body(body, "msgpack", "query")


def test_the_front_door_refuses_them_too() -> None:
    body = b'{"model":"m","messages":[{}' + b",{}" * 500_000 + b"]}"
    with pytest.raises(RequestRefusedError, match="more than 400000 lists and objects"):
        read_prompt(body, CHAT)
