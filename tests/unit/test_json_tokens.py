"""Token ids straight from a JSON body: the same as reading the JSON in full, or left to whoever reads it in full."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import token_bytes
from schemas.native import HASHING_IS_COMPILED, hashing
from services.router.encodings import BodyRefusedError
from services.router.query_request import read_json_query

FIELD = b"token_ids"

if not HASHING_IS_COMPILED:
    pytest.skip("the compiled parts are not built into this installation", allow_module_level=True)

texts = st.text(st.sampled_from('ab"\\[]{},:é\n'), max_size=8)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), texts)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@given(
    before=st.dictionaries(texts, values, max_size=3),
    tokens=st.lists(st.integers(-(2**33), 2**40), max_size=20) | values,
    after=st.dictionaries(texts, values, max_size=3),
    indent=st.sampled_from([None, 0, 3]),
)
def test_tokens_come_out_as_from_the_whole_body(
    before: dict[str, Any], tokens: Any, after: dict[str, Any], indent: int | None
) -> None:
    whole = {**before, "token_ids": tokens, **after}
    body = json.dumps(whole, indent=indent, ensure_ascii=False).encode()
    taken = hashing.take_tokens(body, FIELD)
    plain = isinstance(tokens, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in tokens)
    if taken is None:
        assert not plain or b"\\" in body or not tokens
        return
    rest, packed = taken
    assert orjson.loads(rest) == {**orjson.loads(body), "token_ids": []}
    assert plain
    assert packed == token_bytes(tokens)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1,2]",
        b'{"token_ids":[1,2',
        b'{"token_ids":[1,,2]}',
        b'{"token_ids":[1,2,]}',
        b'{"token_ids":[01]}',
        b'{"token_ids":[1.5]}',
        b'{"token_ids":[1e3]}',
        b'{"token_ids":["]"]}',
        b'{"token_ids":[-]}',
        b'{"token_ids":[[1]]}',
        b'{"token_ids":[1],"token_ids":[2]}',
        b'{"token_ids":5}',
        b'{"a":1}',
        b'{"\\u0074oken_ids":[1]}',
        b'{"token_ids":[9999999999999999999]}',
    ],
)
def test_what_is_not_plain_is_left_to_the_full_reader(body: bytes) -> None:
    assert hashing.take_tokens(body, FIELD) is None


@pytest.mark.parametrize(
    "body", [b'{"token_ids":[1,2]', b'{"token_ids":[1] "a":2}', b'{"token_ids":[1],"a":}', b'{"token_ids":[1]}x']
)
def test_a_body_that_is_broken_elsewhere_is_refused_all_the_same(body: bytes) -> None:
    with pytest.raises(BodyRefusedError, match="not json"):
        read_json_query(body, 100)


def test_nested_fields_of_the_same_name_are_not_meant() -> None:
    body = b'{"other":{"token_ids":[7]},"token_ids":[ 1 , 2 ],"list":[{"token_ids":[8]}]}'
    taken = hashing.take_tokens(body, FIELD)
    assert taken == (b'{"other":{"token_ids":[7]},"token_ids":[],"list":[{"token_ids":[8]}]}', token_bytes([1, 2]))
