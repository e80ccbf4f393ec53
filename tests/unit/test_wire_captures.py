"""Every captured byte of vLLM's publisher module and of real engines decodes to what was published."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.blocks import U64_MASK, Tier, tier_of_medium
from schemas.wire import memcache, vllm
from schemas.wire.frames import END, parse_live, parse_replay, replay_request
from schemas.wire.limits import Limits
from schemas.wire.types import RejectReason, WireBatch, WireCleared, WireRemoved, WireStored
from schemas.wire.vllm_encode import REMOVED_FIELDS, STORED_FIELDS
from tests.captures import (
    engine_capture,
    engine_capture_names,
    pool_capture,
    publisher_capture,
    publisher_capture_names,
)

NOT_MAIN = {"sliding_window", "mamba"}


def frames(case: Any) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in case]


def low64(published: Any) -> int:
    if isinstance(published, dict):
        return int.from_bytes(bytes.fromhex(published["$hex"])[-8:], "big")
    return int(published) & U64_MASK


def expected_tier(event: dict[str, Any]) -> Tier | None:
    return tier_of_medium(event["medium"]) if event.get("medium") else Tier.NPU


def assert_same(published: dict[str, Any], batch: WireBatch) -> None:
    main = [event for event in published["events"] if event.get("kv_cache_spec_kind") not in NOT_MAIN]
    assert len(batch.events) == len(main)
    assert len(batch.rejected) == len(published["events"]) - len(main)
    assert {refusal.reason for refusal in batch.rejected} <= {RejectReason.NON_MAIN_ATTENTION}
    assert batch.timestamp == published["ts"]
    for event, decoded in zip(main, batch.events, strict=True):
        if event["type"] == "AllBlocksCleared":
            assert decoded == WireCleared(tier=Tier.NPU)
            continue
        assert isinstance(decoded, WireStored | WireRemoved)
        assert decoded.hashes == tuple(low64(value) for value in event["block_hashes"])
        assert decoded.tier == expected_tier(event)
        assert decoded.group_idx == event.get("group_idx")
        assert decoded.locality == event.get("locality")
        assert decoded.ownership == event.get("ownership")
        if isinstance(decoded, WireStored):
            parent = event["parent_block_hash"]
            assert decoded.parent == (None if parent is None else low64(parent))
            assert list(decoded.token_ids) == event["token_ids"]
            assert decoded.block_size == event["block_size"]
            assert decoded.lora_id == event["lora_id"]
            assert decoded.lora_name == event.get("lora_name")
            assert decoded.session_id == event.get("session_id")
            assert decoded.spec_kind == event.get("kv_cache_spec_kind")
            assert decoded.sliding_window == event.get("kv_cache_spec_sliding_window")


@pytest.mark.parametrize("name", publisher_capture_names())
def test_every_message_of_every_release_decodes_to_what_was_published(name: str) -> None:
    checked = 0
    for session in publisher_capture(name)["sessions"]:
        for case in session["cases"]:
            if "frames_hex" not in case:
                continue
            live = parse_live(frames(case["frames_hex"]))
            assert live.seq == case["seq"]
            assert live.topic.decode() == session["topic"]
            batch = vllm.decode(live.payload)
            assert_same(case["published"], batch)
            wanted_rank = case["published"]["data_parallel_rank"]
            # vLLM stamps its own rank where the batch names none; 0.9.0.1 does not know ranks.
            if batch.dp_rank is not None and wanted_rank is not None:
                assert batch.dp_rank in (wanted_rank, session["dp_rank"])
            checked += 1
    assert checked >= 30


@pytest.mark.parametrize("name", publisher_capture_names())
def test_every_replay_reply_parses_and_ends_with_the_end_marker(name: str) -> None:
    complete = 0
    for session in publisher_capture(name)["sessions"]:
        published = {case["seq"]: case for case in session["cases"] if "frames_hex" in case}
        for replay in session["replays"]:
            replies = [parse_replay(frames(message)) for message in replay["reply_messages_hex"]]
            batches = [reply for reply in replies if reply != END]
            for reply in batches:
                assert reply.payload == frames(published[reply.seq]["frames_hex"])[2]
            if replay["client_socket"] != "DEALER" or not replies:
                continue  # A REQ socket gets one batch and no end marker; a request without delimiter gets nothing.
            assert replay_request(replay["start_seq"]) == frames(replay["request_frames_hex"])
            assert replies[-1] == END
            assert len(batches) == len(replies) - 1
            complete += 1
    assert complete >= 3


@pytest.mark.parametrize("name", [*engine_capture_names(), "vllm-edge_0.32.0_async"])
def test_every_frame_of_every_real_engine_decodes_without_a_refusal(name: str) -> None:
    capture = engine_capture(name)
    assert capture["live"]
    for message in capture["live"]:
        batch = vllm.decode(parse_live(frames(message["frames_hex"])).payload)
        assert batch.rejected == ()
        assert batch.events
    for message in capture.get("replay_from_0", ()):
        reply = parse_replay(frames(message))
        if reply != END:
            assert vllm.decode(reply.payload).rejected == ()


def test_a_hash_stored_twice_by_two_events_is_read_twice_and_removed_twice() -> None:
    kinds: dict[int, list[type]] = {}
    for timestamp, events, rank in engine_capture("vllm-dup_0.32.0"):
        batch = vllm.decode(msgspec.msgpack.encode([timestamp, events, rank]))
        assert batch.rejected == ()
        for event in batch.events:
            assert isinstance(event, WireStored | WireRemoved)
            for name in event.hashes:
                kinds.setdefault(name, []).append(type(event))
    assert [WireStored, WireStored, WireRemoved, WireRemoved] in kinds.values()


def test_extra_keys_of_the_publisher_cases_are_told_apart() -> None:
    cases = {
        case["case"]: vllm.decode(frames(case["frames_hex"])[2])
        for session in publisher_capture("vllm-0.32.0")["sessions"][:1]
        for case in session["cases"]
        if "frames_hex" in case
    }
    (salted,) = cases["extra_keys_salt"].events
    assert isinstance(salted, WireStored)
    assert (salted.cache_salt, salted.lora_name, salted.block_keys) == ("tenant-salt", None, ())
    (image,) = cases["extra_keys_mm_lora"].events
    assert isinstance(image, WireStored)
    assert (image.cache_salt, image.lora_name, image.block_keys) == (None, "adapter-a", (("mmhash0123:0",),))


def test_the_real_metaservice_clears_one_medium_and_names_no_location() -> None:
    (message,) = pool_capture("memcache-1.3.0_cleared")["frames_hex"]
    live = parse_live(frames(message))
    assert (live.topic, live.seq) == (b"kv@m", 1)
    batch = memcache.decode(live.payload)
    assert batch.events == (WireCleared(tier=Tier.DISK, backend_id="", model="m", tenant="default"),)
    assert batch.rejected == ()


def test_our_metaservice_form_is_byte_for_byte_the_real_one() -> None:
    (message,) = pool_capture("memcache-1.3.0_cleared")["frames_hex"]
    payload = bytes.fromhex(message[2])
    (event,) = msgspec.msgpack.decode(payload)["events"]
    made = memcache.MetaEvent(
        event_id=event["event_id"],
        timestamp=event["timestamp"],
        event_type=event["event_type"],
        backend_id=event["backend_id"],
        medium=event["medium"],
        model_name=event["model_name"],
        block_size=event["block_size"],
    )
    assert memcache.encode_batch([made]) == payload


def test_the_position_tables_name_every_field_and_the_reasons_every_refusal() -> None:
    page = (Path(__file__).parents[2] / "schemas" / "wire" / "README.md").read_text()
    positions = [
        [(int(number), name) for number, name in re.findall(r"^\| (\d+) \| `(\w+)`", part, re.MULTILINE)]
        for part in re.split(r"\*\*BlockRemoved\*\*|\*\*AllBlocksCleared\*\*|## memcache", page)
    ]
    assert positions[0] == list(enumerate(STORED_FIELDS, start=1))
    assert positions[1] == list(enumerate(REMOVED_FIELDS, start=1))
    payload = memcache.encode_batch([memcache.MetaEvent(0, 1, "stored", "b", "cpu", (1,))])
    (event,) = msgspec.msgpack.decode(payload)["events"]
    assert positions[3] == list(enumerate(event, start=1))
    for reason in RejectReason:
        assert f"`{reason}`" in page
    for name in Limits.__dataclass_fields__:
        assert f"| `{name}`" in page
