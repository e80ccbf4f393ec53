"""Canonical events: what travels on ``kv.events.>`` (ingest to matcher) and ``kv.index.>`` (matcher to router).

Bodies are msgpack arrays (msgspec, array_like) led by a version. Hashes travel as packed little-endian u64 (``bytes``).
Fields are only ever appended, with a default; a reader ignores fields it does not know.
"""

from typing import Literal, TypeVar

import msgspec

from schemas.blocks import PLAIN_ROOT, Tier

WIRE_VERSION = 1
MAX_EVENTS_PER_BATCH = 65_536
MAX_BLOCKS_PER_EVENT = 262_144

SourceKind = Literal["engine", "pool"]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks that a publisher says it stored, in chain order.

    engine_hashes: what the publisher calls them; parent: the block before the first one, None for a chain's start.
    content_hashes: one per block with block extra keys folded in, or empty when the publisher sent no tokens.
    root: namespace of a chain that starts here (schemas.blocks.namespace_root). block_size: tokens per block, 0
    unknown.
    backend_id: where a pool put it (pool events only, else empty). An empty model / tenant means the batch's own.
    """

    tier: Tier
    engine_hashes: bytes
    parent: int | None = None
    content_hashes: bytes = b""
    root: int = PLAIN_ROOT
    block_size: int = 0
    backend_id: str = ""
    model: str = ""
    tenant: str = ""


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks that left one tier of a publisher (or of one pool location, when backend_id is set)."""

    tier: Tier
    engine_hashes: bytes
    backend_id: str = ""
    model: str = ""
    tenant: str = ""


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Everything left these tiers of a publisher (or of one pool location); never wider than `tiers`."""

    tiers: tuple[Tier, ...]
    backend_id: str = ""
    model: str = ""
    tenant: str = ""


Event = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Body of ``kv.events.<source>.<model>.<instance>.<dp>``: consecutive ZMQ batches of one publisher.

    first_seq / last_seq: the publisher's own sequence numbers covered. generation: milliseconds since the epoch at
    which
    the publisher's current life began (a higher one retires the lower). published_at, received_at: seconds since the
    epoch.
    own_tiers: tiers that this engine's events prove by themselves (no pool behind it), e.g. ("cpu",).
    counted: stores of one hash add up and each needs a removal of its own (docs/adr/0006).
    pool_expected: a pool stands behind this engine, so the content of its blocks may be asked for later.
    last_fingerprint: a hash of the publisher's message last_seq (0 unknown), by which its history is known again.
    last_published_at: its own time. missing: numbers of this generation known to be missing up to here.
    """

    version: int
    source: SourceKind
    model: str
    tenant: str
    instance_id: str
    dp_rank: int
    generation: int
    first_seq: int
    last_seq: int
    published_at: float
    received_at: float
    events: list[Event]
    own_tiers: tuple[Tier, ...] = ()
    counted: bool = False
    pool_expected: bool = True
    last_fingerprint: int = 0
    last_published_at: float = 0.0
    missing: int = 0


class Worker(msgspec.Struct, frozen=True, array_like=True, tag="worker"):
    """Holder of NPU blocks, and of the CPU / disk tiers an engine has to itself."""

    instance_id: str
    dp_rank: int


class Location(msgspec.Struct, frozen=True, array_like=True, tag="location"):
    """Holder of pool blocks: one backend (node, Pod IP) of a pool."""

    pool_id: str
    backend_id: str


Holder = Worker | Location


class IndexStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks confirmed for a holder, in chain order.

    Empty content_hashes: the router knows the blocks by name (holder's domain, then teacher's) or ignores and counts
    them.
    teacher: the worker whose hash names `parent` is in, when that is not the holder itself (pool blocks).
    """

    holder: Holder
    tier: Tier
    engine_hashes: bytes
    parent: int | None = None
    content_hashes: bytes = b""
    root: int = PLAIN_ROOT
    block_size: int = 0
    counted: bool = False
    teacher: Worker | None = None


class IndexRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks that left one tier of a holder. Unknown hashes are harmless."""

    holder: Holder
    tier: Tier
    engine_hashes: bytes


class IndexCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Everything a holder has in these tiers is gone. A Location with an empty backend_id names all locations of a
    pool."""

    holder: Holder
    tiers: tuple[Tier, ...]


IndexEvent = IndexStored | IndexRemoved | IndexCleared


class IndexGroup(msgspec.Struct, frozen=True, array_like=True):
    """What one message of ``kv.events.>`` became.

    source_sequence: its JetStream sequence in KV_EVENTS (0: did not come through it, e.g. HTTP /events). The router
    skips
    a group whose source_sequence is not above the last one applied, so repeats and late writers change nothing.
    """

    source_sequence: int
    source: SourceKind
    instance_id: str
    dp_rank: int
    generation: int
    first_seq: int
    last_seq: int
    received_at: float
    events: list[IndexEvent]
    part: int = 0


class IndexBatch(msgspec.Struct, frozen=True, array_like=True):
    """Body of ``kv.index.<model>.<tenant>``: groups in stream order.

    source_epoch: when KV_EVENTS was created, in milliseconds; source_sequence counts within it (0: unknown).
    """

    version: int
    model: str
    tenant: str
    groups: list[IndexGroup]
    source_epoch: int = 0


class StateNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of ``kv.state.<state>.<model>`` (core NATS tap, msgpack map): one step of the state machine.

    preview: at most four engine hashes as hex. reason: why something was dropped.
    """

    state: str
    model: str
    tenant: str = "default"
    at: float = 0.0
    service: str = ""
    source: str = ""
    instance_id: str = ""
    dp_rank: int = 0
    event_type: str = ""
    medium: str = ""
    backend_id: str = ""
    blocks: int = 0
    seq: int = 0
    reason: str = ""
    preview: tuple[str, ...] = ()


STATES = (
    "received",
    "parsed",
    "queued",
    "offload_cached",
    "matched",
    "confirmed",
    "applied",
    "dropped",
    "pending_expired",
)

_Body = TypeVar("_Body", EventBatch, IndexBatch)

_encoder = msgspec.msgpack.Encoder()
_event_batch_decoder = msgspec.msgpack.Decoder(EventBatch)
_index_batch_decoder = msgspec.msgpack.Decoder(IndexBatch)
_state_note_decoder = msgspec.msgpack.Decoder(StateNote)


class BodyError(ValueError):
    """A message body that is not what its subject promises; the text names the field."""


def encode(body: EventBatch | IndexBatch | StateNote) -> bytes:
    """The msgpack form of a body."""
    return _encoder.encode(body)


def decode_event_batch(body: bytes) -> EventBatch:
    """Read a ``kv.events.>`` body. Raises BodyError."""
    return _decode(_event_batch_decoder, body)


def decode_index_batch(body: bytes) -> IndexBatch:
    """Read a ``kv.index.>`` body. Raises BodyError."""
    return _decode(_index_batch_decoder, body)


def decode_state_note(body: bytes) -> StateNote:
    """Read a ``kv.state.>`` body. Raises BodyError."""
    try:
        return _state_note_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(str(error)) from error


def _decode(decoder: msgspec.msgpack.Decoder[_Body], body: bytes) -> _Body:
    try:
        batch = decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BodyError(str(error)) from error
    if batch.version != WIRE_VERSION:
        raise BodyError(f"version {batch.version} is not understood, this release reads version {WIRE_VERSION}")
    return batch
