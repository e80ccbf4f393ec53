"""What health checks say of engines: the KV bucket ``kv_liveness``, one record per engine DP rank.

Keys are those of the registry. Written by one coordinator, read by every router. Event traffic says nothing of it:
idle is not dead.
"""

from enum import StrEnum

import msgspec


class LivenessState(StrEnum):
    """alive: answers its health check. dead: does not. asleep: answers, but has given its KV cache up."""

    ALIVE = "alive"
    DEAD = "dead"
    ASLEEP = "asleep"


class Liveness(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine rank's record. since, checked_at: seconds since the epoch; generation: of the registration checked.

    reason: what the health check met, for an engine that is not alive.
    """

    instance_id: str
    dp_rank: int
    state: LivenessState
    since: float
    checked_at: float
    generation: int = 0
    reason: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Liveness)


def dump_liveness(record: Liveness) -> bytes:
    """The JSON form of a record."""
    return _encoder.encode(record)


def load_liveness(body: bytes) -> Liveness:
    """Read a record. Raises ValueError."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
