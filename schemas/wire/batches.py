"""The outer shape that all array batches share: ``[timestamp, events, dp_rank]``, in both orders seen in the field."""

from typing import Any

import msgspec

from schemas.wire.limits import Limits
from schemas.wire.raw import NIL, TOO_DEEP, is_array, list_view
from schemas.wire.refusal import RefusedError
from schemas.wire.types import RejectReason, WireError

MILLISECONDS_FROM = 1e11
MAX_DP_RANK = 65_535


class _Outer(msgspec.Struct, array_like=True):
    timestamp: msgspec.Raw
    second: msgspec.Raw
    third: msgspec.Raw = NIL


_outer = msgspec.msgpack.Decoder(_Outer)
_events = msgspec.msgpack.Decoder(list[msgspec.Raw])
_scalar = msgspec.msgpack.Decoder(int | float | None)


def check_payload(payload: bytes, limits: Limits) -> None:
    """Refuse empty and oversized payloads. Raises WireError."""
    if not payload:
        raise WireError(RejectReason.NOT_MSGPACK, "empty payload")
    if len(payload) > limits.payload_bytes:
        raise WireError(RejectReason.TOO_LARGE, f"payload of {len(payload)} bytes, at most {limits.payload_bytes}")


def seconds(timestamp: object) -> float:
    """A timestamp in seconds since the epoch; milliseconds are told by their size, anything odd is 0 (unknown)."""
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        return 0.0
    value = float(timestamp)
    if not 0 < value < 1e15:
        return 0.0
    return value / 1000.0 if value >= MILLISECONDS_FROM else value


def event_list(raw: msgspec.Raw, limits: Limits) -> list[msgspec.Raw]:
    """The undecoded events of a batch. Raises WireError when there are too many or they are no list."""
    try:
        list_view(raw, "events", limits.events)
    except RefusedError as error:
        shape = error.reason is RejectReason.WRONG_TYPE
        raise WireError(RejectReason.WRONG_SHAPE if shape else error.reason, error.detail) from None
    try:
        return _events.decode(raw)
    except RecursionError:
        raise WireError(RejectReason.LIMIT, TOO_DEEP) from None


def split_array_batch(payload: bytes, limits: Limits) -> tuple[float, list[msgspec.Raw], int | None]:
    """Timestamp, undecoded events and dp_rank of an array batch. Raises WireError for a whole unusable message."""
    check_payload(payload, limits)
    if not is_array(payload[0]):
        raise WireError(RejectReason.WRONG_SHAPE, f"a batch is an array, first byte is 0x{payload[0]:02x}")
    try:
        outer = _outer.decode(payload)
    except msgspec.ValidationError as error:
        raise WireError(RejectReason.WRONG_SHAPE, f"not [timestamp, events, dp_rank]: {error}") from None
    except RecursionError:
        raise WireError(RejectReason.LIMIT, TOO_DEEP) from None
    except msgspec.DecodeError as error:
        raise WireError(RejectReason.NOT_MSGPACK, str(error)) from None
    events, rank = outer.second, outer.third
    if not _is_list(events) and _is_list(rank):
        events, rank = rank, events
    if not _is_list(events):
        raise WireError(RejectReason.WRONG_SHAPE, "no list of events in second or third place")
    return seconds(_number(outer.timestamp)), event_list(events, limits), _rank(_number(rank))


def _is_list(value: msgspec.Raw) -> bool:
    return is_array(memoryview(value)[0])


def _number(value: msgspec.Raw) -> Any:
    try:
        return _scalar.decode(value)
    except msgspec.DecodeError:
        return None


def _rank(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DP_RANK else None
