"""Block identity against the published check vectors and its own rules."""

import hashlib
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import (
    PLAIN_ROOT,
    Tier,
    chain,
    content_hashes,
    first_key,
    fold_block_extra,
    namespace_root,
    pack_hashes,
    prefix_keys,
    tier_of_medium,
    token_bytes,
    unpack_hashes,
)
from schemas.subjects import engine_key, escape, events_subject, index_subject, pool_key, state_subject, unescape
from schemas.wire.hashes import low64, memcache_text, plain_text


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4], 14643705804678351452),
        ([5, 6, 7, 8], 16777012769546811212),
        ([1, 2, 3], 15024015205894559313),
        ([0, 1, 2, 3], 9143094415614847814),
        ([4, 5, 6, 7], 12124091508212882195),
        (list(range(128)), 9509643624113304476),
    ],
)
def test_content_hashes_equal_the_check_vectors(tokens: list[int], expected: int) -> None:
    assert list(content_hashes(token_bytes(tokens), len(tokens))) == [expected]


def test_the_low_64_rule_agrees_for_bytes_hex_and_ints() -> None:
    digest = hashlib.sha256(b"abc").digest()
    expected = 12975151322591401389
    assert low64(digest, plain_text) == expected
    assert memcache_text(digest.hex()) == expected
    assert int.from_bytes(digest, "big") & (2**64 - 1) == expected


def test_tokens_outside_u32_wrap_like_a_cast() -> None:
    assert token_bytes([-1, 2**32, 2**32 + 5]) == token_bytes([2**32 - 1, 0, 5])


def test_t24_only_whole_blocks_are_hashed() -> None:
    assert len(content_hashes(token_bytes(range(11)), 4)) == 2
    assert len(content_hashes(token_bytes(range(3)), 4)) == 0
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        content_hashes(b"", 0)


def test_prefix_keys_roll_from_the_content_hash_or_from_the_root() -> None:
    assert list(prefix_keys([7, 8])) == [7, chain(7, 8)]
    assert list(prefix_keys([7, 8], root=5)) == [chain(5, 7), chain(chain(5, 7), 8)]
    assert first_key(PLAIN_ROOT, 7) == 7


def test_ha_04_an_adapter_and_a_salt_of_one_name_are_different_namespaces() -> None:
    roots = [
        namespace_root(),
        namespace_root(lora_name="X"),
        namespace_root(cache_salt="X"),
        namespace_root(extra_keys=("X",)),
        namespace_root(lora_id=7),
        namespace_root(lora_name="X", cache_salt="X"),
        namespace_root(lora_name="7"),
        namespace_root(lora_name="XX"),
        namespace_root(extra_keys=("X", "X")),
    ]
    assert len(set(roots)) == len(roots)
    assert roots[0] == PLAIN_ROOT
    assert namespace_root(lora_name="", cache_salt="") == PLAIN_ROOT
    assert namespace_root(lora_name="X", lora_id=7) == namespace_root(lora_name="X")


def test_t29_extra_keys_of_a_block_change_its_hash() -> None:
    hashes = {fold_block_extra(7, keys) for keys in [(), ("a",), ("b",), ("a", "b"), ("b", "a")]}
    assert len(hashes) == 5
    assert 7 in hashes


def test_ha_02_and_ha_03_keys_are_equal_in_every_process_whatever_the_hash_seed() -> None:
    code = "from schemas.blocks import *; print(namespace_root('a','b',('c',)), list(prefix_keys([1,2], 3)))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("word", "tier"),
    [("GPU", Tier.NPU), ("npu", Tier.NPU), ("Xpu", Tier.NPU), ("CPU", Tier.CPU), ("cpu", Tier.CPU), ("dram", Tier.CPU),
     ("SHARED_STORAGE", Tier.DISK), ("FS", Tier.DISK), ("nof_ssd", Tier.DISK), ("tape", None), ("", None)],
)  # fmt: skip
def test_medium_words_are_read_without_case_and_unknown_ones_are_unknown(word: str, tier: Tier | None) -> None:
    assert tier_of_medium(word) is tier


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_hashes_come_back(values: list[int]) -> None:
    assert list(unpack_hashes(pack_hashes(values))) == values


def test_hashes_are_unpacked_from_any_buffer_by_its_bytes() -> None:
    values = array("Q", [1, 2**64 - 1, 3])
    for buffer in (values, values.tobytes(), bytearray(values.tobytes()), memoryview(values), array("I", [7, 0])):
        assert unpack_hashes(buffer).tobytes() == memoryview(buffer).cast("B").tobytes()
    with pytest.raises(ValueError, match="got 4"):
        unpack_hashes(array("I", [7]))


def test_packed_hashes_of_odd_length_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        unpack_hashes(b"123")


@given(st.text())
def test_names_become_one_valid_subject_token_and_back(name: str) -> None:
    token = escape(name)
    assert unescape(token) == name
    assert token
    assert not set(token) & set(" .*>\t\r\n")


@pytest.mark.parametrize("token", ["=0", "=zz", "a=", "=a0"])
def test_tokens_that_escaping_cannot_make_are_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"bad escape|invalid"):
        unescape(token)


def test_the_subject_grammar() -> None:
    assert events_subject("engine", "org/m.1", "i", 3) == "kv.events.engine.org=2Fm=2E1.i.3"
    assert index_subject("m", "") == "kv.index.m.="
    assert state_subject("matched", "m") == "kv.state.matched.m"
    assert (engine_key("a b", 0), pool_key("p")) == ("engine.a=20b.0", "pool.p")
