"""The NATS subject grammar, in one place: names are escaped to be valid tokens and back.

* ``kv.events.<source>.<model>.<instance>.<dp>``: canonical event batches (stream KV_EVENTS)
* ``kv.index.<model>.<tenant>``: confirmed index changes (stream KV_INDEX)
* ``kv.state.<state>.<model>``: tap of the state machine (core NATS)
* ``kv.control.<verb>``: commands between services
* ``kv.dead.<service>``: bodies that could not be handled, kept for inspection
"""

import re

EVENTS_STREAM = "KV_EVENTS"
INDEX_STREAM = "KV_INDEX"
DEAD_STREAM = "KV_DEAD"
REGISTRY_BUCKET = "kv_registry"
SNAPSHOT_BUCKET = "kv_snapshots"
STREAMS_BUCKET = "kv_streams"
CURSORS_BUCKET = "kv_cursors"
LEASE_BUCKET = "kv_leases"
LIVENESS_BUCKET = "kv_liveness"
MATCHER_CONSUMER = "matcher"

EVENTS_ALL = "kv.events.>"
INDEX_ALL = "kv.index.>"
STATE_ALL = "kv.state.>"
CONTROL_ALL = "kv.control.>"
RESYNC_ALL = "kv.control.resync.>"
DEAD_ALL = "kv.dead.>"

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED_BYTE = re.compile(r"=([0-9A-F]{2})")
EMPTY_TOKEN = "="


def escape(name: str) -> str:
    """A name as one subject token (also a valid KV key token): other bytes become ``=XX``, empty becomes ``=``."""
    if _PLAIN.fullmatch(name):
        return name
    if not name:
        return EMPTY_TOKEN
    return "".join(
        chr(byte) if _PLAIN.fullmatch(chr(byte)) and byte < 128 else f"={byte:02X}"
        for byte in name.encode("utf-8", "surrogatepass")
    )


def unescape(token: str) -> str:
    """The name a token stands for. Raises ValueError for a token that escape() cannot have made."""
    if token == EMPTY_TOKEN:
        return ""
    raw = bytearray()
    position = 0
    while position < len(token):
        if token[position] == "=":
            match = _ESCAPED_BYTE.match(token, position)
            if match is None:
                raise ValueError(f"bad escape at position {position} of subject token {token!r}")
            raw.append(int(match[1], 16))
            position += 3
        else:
            raw += token[position].encode()
            position += 1
    return raw.decode("utf-8", "surrogatepass")


def events_subject(source: str, model: str, instance_id: str, dp_rank: int) -> str:
    """Subject of a publisher's canonical events."""
    return f"kv.events.{source}.{escape(model)}.{escape(instance_id)}.{dp_rank}"


def index_subject(model: str, tenant: str) -> str:
    """Subject of the index changes of one space."""
    return f"kv.index.{escape(model)}.{escape(tenant)}"


def state_subject(state: str, model: str) -> str:
    """Tap subject of one state of one model."""
    return f"kv.state.{state}.{escape(model)}"


def engine_key(instance_id: str, dp_rank: int) -> str:
    """Registry key of an engine's DP rank."""
    return f"engine.{escape(instance_id)}.{dp_rank}"


def pool_key(instance_id: str) -> str:
    """Registry key of a pool."""
    return f"pool.{escape(instance_id)}"


def stream_key(source: str, instance_id: str, dp_rank: int) -> str:
    """Key of a publisher in the buckets ``kv_streams`` (its state) and ``kv_cursors`` (how far it was published)."""
    return f"{source}.{escape(instance_id)}.{dp_rank}"


def resync_subject(source: str, instance_id: str, dp_rank: int) -> str:
    """Subject of the wish that a publisher be asked for all it can still tell (core NATS, empty body)."""
    return f"kv.control.resync.{stream_key(source, instance_id, dp_rank)}"


def parse_resync_subject(subject: str) -> tuple[str, str, int]:
    """Source, instance and rank of a resync subject. Raises ValueError."""
    tokens = subject.split(".")
    if len(tokens) != 6 or not tokens[5].isdecimal():
        raise ValueError(f"{subject!r} is not kv.control.resync.<source>.<instance>.<dp>")
    return tokens[3], unescape(tokens[4]), int(tokens[5])
