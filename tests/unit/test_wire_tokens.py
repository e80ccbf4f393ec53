"""Token ids of the wire are read the same with and without the compiled parts."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.native import HASHING_IS_COMPILED
from schemas.wire import tokens as module
from schemas.wire.refusal import RefusedError
from schemas.wire.tokens import read_tokens

encode = msgspec.msgpack.encode


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, (1 << 32) - 1)), max_size=70))
def test_every_u32_comes_through(tokens: list[int]) -> None:
    assert read_tokens(msgspec.Raw(encode(tokens)), 100) == array("I", tokens)


@given(st.lists(st.one_of(st.integers(-5, 1 << 40), st.text(max_size=3), st.none(), st.floats()), max_size=8))
def test_with_and_without_the_compiled_parts_it_is_the_same(tokens: list[object]) -> None:
    raw = msgspec.Raw(encode(tokens))
    results = []
    for compiled in (HASHING_IS_COMPILED, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "HASHING_IS_COMPILED", compiled)
            try:
                results.append(read_tokens(raw, 100))
            except RefusedError as error:
                results.append((error.reason, error.detail))
    assert results[0] == results[1]
