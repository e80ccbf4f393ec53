"""The simulated memcache pool: where keys go, which events that brings, and their bytes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.block_hashes import low64
from kvroute.sim.memcache_events import MetaServiceNames, encode_batch, key_hashes
from kvroute.sim.pool_store import Placed, PoolEvent, PoolStore, object_key
from tests.captures import pool_capture

NAMES = MetaServiceNames(model_name="m", block_size=16)


def test_the_real_metaservices_cleared_event_is_reproduced_byte_for_byte() -> None:
    topic, _, payload = (bytes.fromhex(frame) for frame in pool_capture("memcache-1.3.0_cleared")["frames_hex"][0])
    timestamp = msgspec.msgpack.decode(payload)["events"][0]["timestamp"]
    assert NAMES.topic == topic
    assert encode_batch([PoolEvent("cleared", "disk", "", 0)], NAMES, timestamp) == payload


@pytest.mark.parametrize(
    ("event", "keys"),
    [
        (PoolEvent("stored", "cpu", "10.0.0.5", 0, "m@tp_rank:0@ff"), 15),
        (PoolEvent("removed", "cpu", "10.0.0.5", 1, "m@tp_rank:0@ff"), 13),
        (PoolEvent("cleared", None, "10.0.0.5", 2), 11),
    ],
)
def test_each_kind_of_event_has_its_number_of_keys_in_the_documented_order(event: PoolEvent, keys: int) -> None:
    decoded = msgspec.msgpack.decode(encode_batch([event], NAMES, 1))["events"][0]
    header = ["event_id", "timestamp", "event_type", "model_name", "block_size", "additional_salt", "lora_name"]
    header += ["tenant_id", "medium", "backend_id", "dp_rank"]
    order = [*header, "seq_hashes", "base_block_idx", "parent_hash", "token_ids"]
    assert list(decoded) == order[:keys]


def test_empty_names_travel_as_nil_except_tenant_and_backend() -> None:
    bare = MetaServiceNames(model_name="", block_size=0, tenant_id="")
    decoded = msgspec.msgpack.decode(encode_batch([PoolEvent("cleared", None, "", 0)], bare, 1))["events"][0]
    assert [decoded[key] for key in ("model_name", "block_size", "medium")] == [None, None, None]
    assert [decoded[key] for key in ("tenant_id", "backend_id")] == ["", ""]
    assert bare.topic == b"kv"


def test_the_hash_is_cut_from_the_end_of_the_object_key() -> None:
    digest = bytes(range(32))
    key = object_key("org/model", digest, tp_rank=3)
    assert key_hashes(key, as_int=True) == [low64(digest)]
    assert key_hashes(key, as_int=False) == [digest.hex()]
    assert key_hashes("m@0x2A", as_int=True) == [42]
    assert key_hashes("no-hash-here", as_int=True) == []


def test_event_ids_count_per_location_and_medium() -> None:
    store = PoolStore()
    store.attach("a", 10)
    store.attach("b", 10)
    store.put("a", ["1", "2"])
    store.put("b", ["3"])
    store.remove(["1"])
    assert [(e.backend_id, e.event_id) for e in store.take_events()] == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]


def test_a_key_that_is_there_already_is_not_stored_again() -> None:
    store = PoolStore()
    store.attach("a", 10)
    store.attach("b", 10)
    assert store.put("a", ["1"]) == [True]
    assert store.put("b", ["1"]) == [False]
    assert store.find(["1", "2"]) == [Placed("cpu", "a"), None]
    assert len(store.take_events()) == 1


def test_a_full_location_uses_a_decode_nodes_memory_before_it_evicts() -> None:
    store = PoolStore()
    store.attach("prefill", 1)
    store.attach("decode", 1)
    store.put("prefill", ["1", "2", "3"])
    assert store.find(["1", "2", "3"]) == [None, Placed("cpu", "decode"), Placed("cpu", "prefill")]


def test_what_leaves_dram_goes_to_disk_and_from_there_away() -> None:
    store = PoolStore()
    store.attach("a", 1, disk_keys=1)
    store.put("a", ["1", "2", "3"])
    steps = [(e.event_type, e.medium, e.key) for e in store.take_events()]
    assert steps == [
        ("stored", "cpu", "1"),
        ("removed", "cpu", "1"),
        ("stored", "disk", "1"),
        ("stored", "cpu", "2"),
        ("removed", "cpu", "2"),
        ("removed", "disk", "1"),
        ("stored", "disk", "2"),
        ("stored", "cpu", "3"),
    ]


def test_using_a_key_keeps_it_longer() -> None:
    store = PoolStore()
    store.attach("a", 2)
    store.put("a", ["old", "new"])
    store.find(["old"])
    store.put("a", ["newest"])
    assert store.find(["old", "new"]) == [Placed("cpu", "a"), None]


def test_a_lost_local_service_clears_its_location_and_no_other() -> None:
    store = PoolStore()
    store.attach("a", 2)
    store.attach("b", 2)
    store.put("a", ["1"])
    store.put("b", ["2"])
    store.take_events()
    store.detach("a")
    assert store.take_events() == [PoolEvent("cleared", None, "a", 0)]
    assert store.find(["1", "2"]) == [None, Placed("cpu", "b")]
    with pytest.raises(KeyError):
        store.put("a", ["3"])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "find", "remove", "lose"]), st.sampled_from("ab"), st.integers(0, 9)
        )
    )
)
def test_following_its_events_gives_exactly_what_the_pool_holds(steps: list[tuple[str, str, int]]) -> None:
    store = PoolStore()
    for name in "ab":
        store.attach(name, 2, disk_keys=2)
    held: set[tuple[str, str, str | None]] = set()
    for action, backend_id, number in steps:
        if action == "put":
            store.put(backend_id, [str(number), str(number + 1)])
        elif action == "find":
            store.find([str(number)])
        elif action == "remove":
            store.remove([str(number)])
        else:
            store.attach(backend_id, 2, disk_keys=2)
        for event in store.take_events():
            if event.event_type == "stored":
                held.add((event.backend_id, str(event.medium), event.key))
            elif event.event_type == "removed":
                held.remove((event.backend_id, str(event.medium), event.key))
            else:
                held = {entry for entry in held if entry[0] != event.backend_id}
        assert held == {(b, m, key) for b in "ab" for m in ("cpu", "disk") for key in store.keys(b, m)}
