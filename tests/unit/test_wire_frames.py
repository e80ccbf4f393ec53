"""ZMQ frames: three for a live message, many shapes for a replay reply."""

import pytest

from schemas.wire.frames import END, LiveMessage, ReplayMessage, parse_live, parse_replay, replay_request
from schemas.wire.types import RejectReason, WireError

SEQ = (5).to_bytes(8, "big")
FF = b"\xff" * 8


def test_a_live_message_is_topic_sequence_and_payload() -> None:
    assert parse_live([b"kv", SEQ, b"payload"]) == LiveMessage(b"kv", 5, b"payload")
    assert parse_live([b"", SEQ, b""]) == LiveMessage(b"", 5, b"")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], RejectReason.FRAME_COUNT),
        ([b"p"], RejectReason.FRAME_COUNT),
        ([b"kv", b"p"], RejectReason.FRAME_COUNT),
        ([b"kv", SEQ, b"p", b"extra"], RejectReason.FRAME_COUNT),
        ([b"kv", SEQ[:4], b"p"], RejectReason.SEQUENCE_WIDTH),
        ([b"kv", b"", b"p"], RejectReason.SEQUENCE_WIDTH),
        ([b"kv", b"00000001" + SEQ, b"p"], RejectReason.SEQUENCE_WIDTH),
        ([b"kv", FF, b""], RejectReason.SEQUENCE_WIDTH),
    ],
)
def test_ev_07_other_frame_sets_are_refused_by_reason(frames: list[bytes], reason: RejectReason) -> None:
    with pytest.raises(WireError) as caught:
        parse_live(frames)
    assert caught.value.reason is reason


@pytest.mark.parametrize("frames", [[b"", SEQ, b"p"], [b"", b"kv", SEQ, b"p"], [SEQ, b"p"], [b"kv", SEQ, b"p"]])
def test_ev_08_replay_replies_with_and_without_topic_and_delimiter_are_read_from_the_end(frames: list[bytes]) -> None:
    assert parse_replay(frames) == ReplayMessage(5, b"p")


@pytest.mark.parametrize("frames", [[b"", FF, b""], [b"", b"", FF, b""], [FF, b""], [b"", FF], [FF]])
def test_t07_the_end_marker_is_never_a_sequence_number(frames: list[bytes]) -> None:
    assert parse_replay(frames) == END


@pytest.mark.parametrize("frames", [[], [b"p"], [b""] * 5, [b"id", b"", b"short", b"p"], [b"", b"p"]])
def test_ev_12_malformed_replies_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        parse_replay(frames)


def test_a_replay_request_has_the_empty_delimiter() -> None:
    assert replay_request(258) == [b"", b"\x00" * 6 + b"\x01\x02"]
