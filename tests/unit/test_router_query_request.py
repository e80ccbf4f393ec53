"""Reading /query and /query_by_hash bodies, and what the answers look like."""

import struct
from typing import Any

import msgspec
import orjson
import pytest

from schemas.blocks import chain, content_hashes, first_key, fold_block_extra, namespace_root, prefix_keys, token_bytes
from schemas.registry import EngineRecord
from services.router.answers import mooncake_answer, query_answer
from services.router.encodings import BodyRefusedError, decode_body, encode_body, encoding_of, is_raw
from services.router.index.port import Coverage
from services.router.query_request import Query, Route, fields_of_query_string, read_query
from services.router.standing import Standings

BLOCK = 4
TOKENS = list(range(1, 13))
HASHES = list(content_hashes(token_bytes(TOKENS), BLOCK))
BODY: dict[str, Any] = {"model": "m", "block_size": BLOCK, "token_ids": TOKENS}


def read(changes: dict[str, Any], route: Route = "query", max_tokens: int = 100) -> Query:
    return read_query({key: value for key, value in (BODY | changes).items() if value is not ...}, route, max_tokens)


def by_hash(**changes: Any) -> Query:
    return read({"token_ids": ...} | changes, "query_by_hash")


def plain_keys() -> bytes:
    return prefix_keys(HASHES).tobytes()


def test_tokens_in_every_form_give_the_same_keys() -> None:
    packed = struct.pack("<12I", *TOKENS)
    forms = [read({}), read({"token_ids": packed}), read_query({"model": "m", "block_size": "4"}, "query", 100, packed)]
    assert {query.keys() for query in forms} == {plain_keys()}


def test_whole_blocks_only() -> None:
    assert read({"token_ids": [*TOKENS, 13, 14, 15]}).keys() == plain_keys()
    assert read({"token_ids": TOKENS[:3]}).keys() == b""


def test_tokens_outside_u32_wrap_like_a_cast() -> None:
    assert read({"token_ids": [token - 2**32 for token in TOKENS]}).keys() == plain_keys()
    assert read({"token_ids": [token + 2**40 for token in TOKENS]}).keys() == plain_keys()


def test_content_hashes_and_rolling_hashes_give_the_keys_of_the_tokens() -> None:
    assert by_hash(block_hashes=HASHES).keys() == plain_keys()
    rolling = list(prefix_keys(HASHES))
    for name in ("seq_hashes", "block_hash"):
        assert by_hash(**{name: rolling}).keys() == plain_keys()
        assert by_hash(**{name: struct.pack("<3Q", *rolling)}).keys() == plain_keys()
    assert by_hash(block_hashes=[value - 2**64 for value in HASHES]).keys() == plain_keys()


def test_by_hash_counts_blocks_unless_it_says_how_large_they_are() -> None:
    assert by_hash(block_hashes=HASHES, block_size=...).block_size == 1
    assert by_hash(block_hashes=HASHES, block_size=16).block_size == 16


def test_ha_04_adapter_salt_and_keys_start_chains_of_their_own() -> None:
    namespaces: list[dict[str, Any]] = [
        {}, {"lora_name": "X"}, {"lora_id": 7}, {"cache_salt": "X"}, {"extra_keys": ["X"]},
        {"lora_name": "X", "cache_salt": "X"}, {"block_extra_keys": {"1": ["X"]}},
    ]  # fmt: skip
    keys = [read(namespace).keys() for namespace in namespaces]
    assert len(set(keys)) == len(keys)
    root = namespace_root("X", "Y", ("Z",))
    asked = read({"lora_name": "X", "cache_salt": "Y", "extra_keys": ["Z"]})
    assert asked.keys() == prefix_keys(HASHES, root).tobytes()
    assert read({"lora_name": "", "cache_salt": None, "extra_keys": []}).keys() == plain_keys()


def test_t29_block_keys_change_their_block_and_what_follows_it() -> None:
    image = fold_block_extra(HASHES[1], ("image:0",))
    expected = [HASHES[0], chain(first_key(0, HASHES[0]), image)]
    expected.append(chain(expected[1], HASHES[2]))
    forms: list[dict[str, Any]] = [
        {"block_extra_keys": {"1": ["image:0"]}},
        {"block_extra_keys": {1: ["image:0"]}},
        {"extra_keys": [None, ["image:0"], []]},
        {"extra_keys": [[], [["image", 0]]]},
        {"block_extra_keys": {"1": ["image:0"], "99": ["beyond the end"]}},
    ]
    for form in forms:
        assert read(form).keys() == struct.pack("<3Q", *expected)


def test_t28_rolling_hashes_are_refused_beside_a_namespace_they_cannot_take() -> None:
    for namespace in ({"cache_salt": "s"}, {"lora_name": "a"}, {"extra_keys": ["k"]}, {"block_extra_keys": {0: ["k"]}}):
        with pytest.raises(BodyRefusedError, match=f"send block_hashes beside {next(iter(namespace))}"):
            by_hash(seq_hashes=HASHES, **namespace)
        assert by_hash(block_hashes=HASHES, **namespace).keys() != plain_keys()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": ...}, "model"),
        ({"model": "x" * 600}, "model"),
        ({"block_size": ...}, "block_size"),
        ({"block_size": 4097}, "block_size"),
        ({"block_size": "four"}, "block_size"),
        ({"block_size": "9" * 5000}, "block_size"),
        ({"token_ids": ...}, "token_ids"),
        ({"token_ids": b"12345"}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"token_ids": [1, 1.5]}, "token_ids"),
        ({"lora_id": True}, "lora_id"),
        ({"extra_keys": ["k"] * 257}, "extra_keys"),
        ({"extra_keys": ["k" * 600]}, "extra_keys"),
        ({"extra_keys": [["k"], "k"]}, "extra keys of block 1"),
        ({"extra_keys": [[{"a": 1}]]}, "extra keys of block 0"),
        ({"block_extra_keys": {"-1": ["k"]}}, "block_extra_keys"),
        ({"block_extra_keys": ["k"]}, "block_extra_keys"),
        ({"dialect": "french"}, "dialect"),
        ({"instance_id": 7}, "instance_id"),
    ],
)
def test_a_refusal_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(BodyRefusedError, match=field) as refusal:
        read(changes)
    assert refusal.value.status == 400
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", ["x", 5, [1, "x"], [1.5], b"1234567"])
def test_hashes_of_a_wrong_form_are_refused(value: object) -> None:
    for name in ("block_hashes", "seq_hashes"):
        with pytest.raises(BodyRefusedError, match=name):
            by_hash(**{name: value})
    with pytest.raises(BodyRefusedError, match="block_hashes"):
        by_hash()


def test_limits_are_413_and_say_which() -> None:
    with pytest.raises(BodyRefusedError, match=r"12 tokens, at most 11 .*router.max_tokens") as refusal:
        read({}, max_tokens=11)
    assert refusal.value.status == 413
    with pytest.raises(BodyRefusedError, match="3 hashes, at most 2") as refusal:
        read({"block_hashes": HASHES}, "query_by_hash", max_tokens=2)
    assert refusal.value.status == 413


def test_the_query_string_carries_everything_but_the_tokens() -> None:
    text = (
        b"model=org%2Fm&block_size=4&extra_keys=a&extra_keys=b&block_extra_keys=%7B%221%22%3A%5B%22i%22%5D%7D&lora_id=7"
    )
    query = read_query(fields_of_query_string(text), "query", 100, token_bytes(TOKENS))
    assert (query.model, query.block_size, query.block_extra) == ("org/m", 4, {1: ("i",)})
    assert query.root == namespace_root(extra_keys=("a", "b"), lora_id=7)


@pytest.mark.parametrize(
    "text", [b"model=%ff", b"\xff=1", b"&".join(b"a=%d" % n for n in range(99)), b"block_extra_keys={"]
)
def test_a_bad_query_string_is_refused(text: bytes) -> None:
    with pytest.raises(BodyRefusedError, match="query string"):
        fields_of_query_string(text)


@pytest.mark.parametrize(
    ("content_type", "encoding", "raw"),
    [
        (None, "json", False),
        ("application/json; charset=utf-8", "json", False),
        ("text/plain", "json", False),
        ("application/msgpack", "msgpack", False),
        (" Application/X-MsgPack ; v=1", "msgpack", False),
        ("APPLICATION/OCTET-STREAM;x=y", "json", True),
    ],
)
def test_the_content_type_decides_the_encoding(content_type: str | None, encoding: str, raw: bool) -> None:
    assert (encoding_of(content_type), is_raw(content_type)) == (encoding, raw)


def test_json_and_msgpack_say_the_same() -> None:
    answer = {"default": {"i": {"longest_matched": 8, "DP": {"0": {"matched_tokens": 8}}}}}
    assert orjson.loads(encode_body(answer, "json")) == answer
    assert msgspec.msgpack.decode(encode_body(answer, "msgpack")) == answer
    assert decode_body(orjson.dumps(BODY), "json", "query") == BODY
    assert decode_body(msgspec.msgpack.encode(BODY), "msgpack", "query") == BODY


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"\xc1", b"[" * 100_000, b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff"],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    for encoding in ("json", "msgpack"):
        with pytest.raises(BodyRefusedError, match="invalid query request body"):
            decode_body(body, encoding, "query")  # type: ignore[arg-type]


ENGINES = [
    EngineRecord(instance_id=name, dp_rank=rank, model="m", block_size=4)
    for name, rank in (("a", 0), ("a", 1), ("b", 0))
]
COVERAGES = [Coverage(1, 0, 0, 0, 0), Coverage(2, 1, 3, 0, 4), Coverage(0, 0, 0, 0, 0)]
ZEROS = {
    "matched_tokens": 0,
    "npu_blocks": 0,
    "cpu_blocks": 0,
    "disk_blocks": 0,
    "cpu_local_blocks": 0,
    "cpu_remote_blocks": 0,
    "disk_local_blocks": 0,
    "disk_remote_blocks": 0,
}


def streams_of(answer: dict[str, Any]) -> dict[str, list[str]]:
    """The ranks that have a word about their streams, taken out of an answer."""
    return {name: list(instance.pop("streams")) for name, instance in answer["t"].items()}


def test_every_registered_instance_is_listed_zeros_included() -> None:
    answer = query_answer("t", ENGINES, COVERAGES, 4, Standings(15.0))
    assert streams_of(answer) == {"a": ["0", "1"], "b": ["0"]}
    assert answer == {
        "t": {
            "a": {
                "longest_matched": 40,
                "DP": {
                    "0": ZEROS | {"matched_tokens": 4, "npu_blocks": 1},
                    "1": {
                        "matched_tokens": 40,
                        "npu_blocks": 2,
                        "cpu_blocks": 4,
                        "disk_blocks": 4,
                        "cpu_local_blocks": 1,
                        "cpu_remote_blocks": 3,
                        "disk_local_blocks": 0,
                        "disk_remote_blocks": 4,
                    },
                },
            },
            "b": {"longest_matched": 0, "DP": {"0": ZEROS}},
        }
    }
    assert query_answer("t", [], [], 4, Standings(15.0)) == {"t": {}}


def test_the_mooncake_shape_has_tokens_per_tier_and_rank() -> None:
    answer = mooncake_answer("t", ENGINES, COVERAGES, 4, Standings(15.0))
    assert streams_of(answer) == {"a": ["0", "1"], "b": ["0"]}
    assert answer == {
        "t": {
            "a": {"longest_matched": 40, "GPU": 8, "CPU": 16, "DISK": 16, "DP": {"0": 4, "1": 40}},
            "b": {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}},
        }
    }
