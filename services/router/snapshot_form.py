"""The form of a router's snapshot: a header that names its place in the stream, then the index of every space (pure).

``KVRS`` · u32 version · u32 length of the header · header (msgpack) · index forms in order of the header's spaces ·
XXH3-64 of everything before. Integers are little-endian. The forms themselves carry a version of their own.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import xxhash

from services.router.index.port import PrefixIndex
from services.router.publishers import PublisherState
from services.router.space import Space, SpaceState
from services.router.spaces import SpaceKey, Spaces

MAGIC = b"KVRS"
VERSION = 1
_PREFIX = struct.Struct("<4sII")
_DIGEST_BYTES = 8


class SnapshotHeader(msgspec.Struct, frozen=True, array_like=True):
    """stream: when KV_INDEX was created, microseconds since the epoch. position: its sequence up to which everything
    is contained. taken_at: seconds since the epoch. incomplete_before: what was stored before (milliseconds) may be
    missing, 0 nothing."""

    stream: int
    position: int
    taken_at: float
    incomplete_before: int
    publishers: list[PublisherState]
    spaces: list[SpaceState]


class SnapshotRefusedError(ValueError):
    """A snapshot that cannot be used. reason: a short word for metrics; the text says more."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Content:
    """What a snapshot is made of, as copied from the spaces while nothing is written to them."""

    header: SnapshotHeader
    indexes: tuple[PrefixIndex, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SnapshotHeader)


def content_of(spaces: Spaces, stream: int, position: int, now: float) -> Content:
    """The spaces' present state; quick. The indexes themselves are only referred to."""
    states = [space.state(*key) for key, space in spaces.spaces.items()]
    header = SnapshotHeader(stream, position, now, spaces.incomplete_before, spaces.publishers.states(), states)
    return Content(header, tuple(space.index for space in spaces.spaces.values()))


def write(content: Content) -> bytes:
    """The binary form; takes a while and may run beside queries, but not beside changes of the indexes."""
    forms = [index.snapshot() for index in content.indexes]
    states = [
        msgspec.structs.replace(state, size=len(form)) for state, form in zip(content.header.spaces, forms, strict=True)
    ]
    header = _encoder.encode(msgspec.structs.replace(content.header, spaces=states))
    parts = [_PREFIX.pack(MAGIC, VERSION, len(header)), header, *forms]
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.intdigest().to_bytes(_DIGEST_BYTES, "little")])


def read(
    body: bytes, make_index: Callable[[], PrefixIndex]
) -> tuple[SnapshotHeader, dict[SpaceKey, tuple[SpaceState, PrefixIndex]]]:
    """The header and the restored indexes; takes a while. Raises SnapshotRefusedError.

    Reasons: ``foreign`` (something else), ``version`` (of a later release), ``damaged``.
    """
    if body[: len(MAGIC)] != MAGIC:
        raise SnapshotRefusedError("foreign", "it is not a snapshot of a router")
    if len(body) < _PREFIX.size + _DIGEST_BYTES:
        raise SnapshotRefusedError("damaged", f"it ends after {len(body)} bytes")
    _, version, length = _PREFIX.unpack_from(body)
    if version != VERSION:
        raise SnapshotRefusedError("version", f"it has version {version}, this release reads version {VERSION}")
    view = memoryview(body)
    if xxhash.xxh3_64_intdigest(view[:-_DIGEST_BYTES]) != int.from_bytes(view[-_DIGEST_BYTES:], "little"):
        raise SnapshotRefusedError("damaged", "its check sum is wrong")
    try:
        header = _decoder.decode(view[_PREFIX.size : _PREFIX.size + length])
    except (msgspec.DecodeError, RecursionError) as error:
        raise SnapshotRefusedError("damaged", f"its header cannot be read: {error}") from error
    position = _PREFIX.size + length
    restored: dict[SpaceKey, tuple[SpaceState, PrefixIndex]] = {}
    for state in header.spaces:
        index = make_index()
        try:
            index.restore(bytes(view[position : position + state.size]))
        except ValueError as error:
            raise SnapshotRefusedError("index", f"the index of {state.model}/{state.tenant}: {error}") from error
        restored[state.model, state.tenant] = (state, index)
        position += state.size
    if position != len(body) - _DIGEST_BYTES:
        raise SnapshotRefusedError("damaged", f"{len(body) - _DIGEST_BYTES - position} bytes belong to no space")
    return header, restored


def adopt(spaces: Spaces, header: SnapshotHeader, restored: dict[SpaceKey, tuple[SpaceState, PrefixIndex]]) -> None:
    """Let the spaces become what the snapshot holds; what the registry has retired since then is dropped at once."""
    made: dict[SpaceKey, Space] = {}
    for key, (state, index) in restored.items():
        made[key] = Space(index, spaces.counts.blocks)
        made[key].take_over(state)
    spaces.take_over(made, header.publishers, header.incomplete_before)
