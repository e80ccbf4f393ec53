"""ZMQ messages: live ones of exactly three frames, and replay replies in all the shapes releases have sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from schemas.wire.types import RejectReason, WireError

SEQUENCE_BYTES: Final = 8
END_SEQUENCE: Final = b"\xff" * SEQUENCE_BYTES


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """topic: never interpreted. seq: the publisher's own counter, from 0."""

    topic: bytes
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayMessage:
    """One batch out of a publisher's replay buffer."""

    seq: int
    payload: bytes


END: Final[Literal["end"]] = "end"


def parse_live(frames: Sequence[bytes]) -> LiveMessage:
    """Read ``[topic][sequence, 8 bytes big-endian][payload]``.

    Raises WireError: FRAME_COUNT, or SEQUENCE_WIDTH for a sequence of another width and for the end marker of a replay.
    """
    if len(frames) != 3:
        raise WireError(RejectReason.FRAME_COUNT, f"{len(frames)} frames, expected topic, sequence and payload")
    topic, sequence, payload = frames
    if len(sequence) != SEQUENCE_BYTES:
        raise WireError(RejectReason.SEQUENCE_WIDTH, f"sequence of {len(sequence)} bytes, expected {SEQUENCE_BYTES}")
    if bytes(sequence) == END_SEQUENCE:
        raise WireError(RejectReason.SEQUENCE_WIDTH, "sequence 2^64-1 ends a replay and names no live message")
    return LiveMessage(bytes(topic), int.from_bytes(sequence, "big"), bytes(payload))


def parse_replay(frames: Sequence[bytes]) -> ReplayMessage | Literal["end"]:
    """Read a replay reply, or END for the end marker; the payload is the last frame, the sequence the one before it.

    ``["", seq, payload]`` up to vLLM 0.25.1, ``["", topic, seq, payload]`` from 0.26, with or without the delimiter.
    The end marker is the sequence ff*8 (which some read as -1 or 2^64-1), with or without an empty payload.
    Raises WireError (FRAME_COUNT, SEQUENCE_WIDTH).
    """
    if frames and bytes(frames[-1]) == END_SEQUENCE and len(frames) <= 3:
        return END
    if not 2 <= len(frames) <= 4:
        raise WireError(RejectReason.FRAME_COUNT, f"{len(frames)} frames in a replay reply, expected 2 to 4")
    sequence, payload = bytes(frames[-2]), bytes(frames[-1])
    if sequence == END_SEQUENCE:
        return END
    if len(sequence) != SEQUENCE_BYTES:
        raise WireError(RejectReason.SEQUENCE_WIDTH, f"sequence of {len(sequence)} bytes in a replay reply, expected 8")
    return ReplayMessage(int.from_bytes(sequence, "big"), payload)


def replay_request(first_seq: int) -> list[bytes]:
    """The frames a DEALER sends to ask for everything from first_seq on; without the delimiter they are ignored."""
    return [b"", first_seq.to_bytes(SEQUENCE_BYTES, "big")]
