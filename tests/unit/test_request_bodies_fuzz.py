"""Whatever stands in a request body, reading it ends in a value or in a refusal with a text; never in another error."""

import contextlib
from typing import Any

import msgspec
import orjson
from hypothesis import given
from hypothesis import strategies as st

from schemas.registration import RegistrationError, parse_registration, parse_unregistration
from schemas.registry import EngineRecord
from services.coordinator.controller_events import parse_controller_event
from services.coordinator.frontdoor.prompts import CHAT, COMPLETIONS, TOKENIZE, RequestRefusedError, read_prompt
from services.coordinator.settings import CoordinatorSettings
from services.router.encodings import BodyRefusedError, decode_body
from services.router.posted_events import read_posted_events
from services.router.publishers import Publishers
from services.router.query_request import read_query

NAMES = ["stored", "removed", "cleared", "cpu", "npu", "tape", "tcp://10.0.0.1:5557", "tcp://*:1", "add", "set"]
NUMBERS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
SCALARS: st.SearchStrategy[Any] = (
    st.none() | NUMBERS | st.text(max_size=12) | st.binary(max_size=16) | st.sampled_from(NAMES)
)
WORDS = st.sampled_from(
    [
        *("model", "modelname", "model_name", "tenant_id", "block_size", "token_ids", "block_hashes", "seq_hashes"),
        *("block_hash", "lora_name", "lora_id", "cache_salt", "extra_keys", "block_extra_keys", "instance_id"),
        *("dialect", "events", "event_id", "event_type", "type", "data", "blocks", "tokens_hash", "parent_hash"),
        *("medium", "dp_rank", "event", "instances", "endpoints", "id", "ip", "address", "job_name", "role"),
        *("business_port", "node_managers", "pod_ip", "host_ip", "medium_endpoints", "endpoint", "host", "port"),
        *("url", "own_tiers", "backend_ids", "counted", "kind", "messages", "content", "prompt", "tools", "0", "1"),
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=6),
    max_leaves=25,
)
ANY_KEYS = st.dictionaries(st.integers() | st.text(max_size=4) | WORDS, VALUES, max_size=4)


def bodies(**known: Any) -> st.SearchStrategy[Any]:
    """Mostly a good body with some fields exchanged, now and then anything."""
    changed = st.dictionaries(st.sampled_from(sorted(known)) | WORDS, VALUES, max_size=4)
    return changed.map(lambda changes: known | changes) | VALUES | ANY_KEYS


EVENT = {"event_id": 1, "event_type": "stored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}
ENGINES = {("a", 0): EngineRecord(instance_id="a", model="m", block_size=4, generation=5)}
REGISTRATION = {
    "instance_id": "a", "type": "vLLM", "modelname": "m", "block_size": 4, "dp_rank": 0,
    "medium_endpoints": {"npu": "tcp://10.0.0.1:5557"},
}  # fmt: skip
ENDPOINT = {"id": 0, "ip": "10.0.0.1", "business_port": "1025"}
INSTANCE = {"id": 1, "job_name": "j", "role": "prefill", "endpoints": {"10.0.0.1": {"0": ENDPOINT}}}


@given(bodies(model="m", block_size=4, token_ids=[1, 2, 3, 4]))
def test_a_query_is_read_or_refused(body: Any) -> None:
    if isinstance(body, dict):
        with contextlib.suppress(BodyRefusedError):
            read_query(body, "query", 1000).keys()


@given(bodies(model="m", block_size=4, block_hashes=[1, 2]))
def test_a_query_by_hash_is_read_or_refused(body: Any) -> None:
    if isinstance(body, dict):
        with contextlib.suppress(BodyRefusedError):
            read_query(body, "query_by_hash", 1000).keys()


@given(bodies(instance_id="a", model_name="m"), st.lists(bodies(**EVENT), max_size=4))
def test_posted_events_are_read_or_refused(body: Any, events: list[Any]) -> None:
    for posted in (body, {**body, "events": events} if isinstance(body, dict) else body):
        if isinstance(posted, dict):
            with contextlib.suppress(BodyRefusedError):
                read = read_posted_events(posted, ENGINES, Publishers())
                assert read.applied + read.refused == len(posted.get("events", []))


@given(bodies(**REGISTRATION))
def test_a_registration_is_read_or_refused(body: Any) -> None:
    for read in (parse_registration, parse_unregistration):
        with contextlib.suppress(RegistrationError):
            read(body)


@given(
    bodies(event="add", instances=[INSTANCE]), st.lists(bodies(**INSTANCE), max_size=3), st.lists(bodies(**ENDPOINT))
)
def test_a_controllers_message_is_read_or_refused(body: Any, instances: list[Any], endpoints: list[Any]) -> None:
    settings = CoordinatorSettings(model="m", block_size=4)
    nested = [
        {**instance, "endpoints": {"10.0.0.1": endpoints}} for instance in instances if isinstance(instance, dict)
    ]
    for message in (body, {"event": "set", "instances": instances}, {"event": "add", "instances": nested}):
        with contextlib.suppress(RegistrationError):
            parse_controller_event(message, settings)


@given(bodies(model="m", prompt="p", messages=[{"role": "user", "content": "c"}]), st.lists(VALUES, max_size=3))
def test_a_prompt_is_read_or_refused(body: Any, messages: list[Any]) -> None:
    for fields in (body, {"model": "m", "messages": messages}, {"model": "m", "prompt": messages}):
        try:
            text = orjson.dumps(fields)
        except TypeError:
            continue
        for path in (CHAT, COMPLETIONS, TOKENIZE):
            with contextlib.suppress(RequestRefusedError):
                read_prompt(text, path)


@given(st.binary(max_size=200) | VALUES.map(msgspec.msgpack.encode))
def test_a_body_is_an_object_or_refused(body: bytes) -> None:
    for encoding in ("json", "msgpack"):
        with contextlib.suppress(BodyRefusedError):
            assert isinstance(decode_body(body, encoding, "query"), dict)  # type: ignore[arg-type]
