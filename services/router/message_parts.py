"""Cuts an index batch into messages that NATS takes, without changing what it does (pure)."""

from collections.abc import Iterator

import msgspec

from schemas.events import IndexBatch, IndexCleared, IndexEvent, IndexStored

MAX_BLOCKS = 16_384
MAX_BYTES = 512 * 1024
_HASH_BYTES = 8
_EVENT_BYTES = 512


def parts_of(batch: IndexBatch) -> Iterator[IndexBatch]:
    """Batches of about MAX_BYTES at most, in order. Long chains go on behind the last block of the piece before."""
    for group in batch.groups:
        events: list[IndexEvent] = []
        size = 0
        for event in (piece for whole in group.events for piece in _pieces(whole)):
            own = _size(event)
            if events and size + own > MAX_BYTES:
                yield msgspec.structs.replace(batch, groups=[msgspec.structs.replace(group, events=events)])
                events, size = [], 0
            events.append(event)
            size += own
        if events:
            yield msgspec.structs.replace(batch, groups=[msgspec.structs.replace(group, events=events)])


def _pieces(event: IndexEvent) -> Iterator[IndexEvent]:
    if isinstance(event, IndexCleared) or len(event.engine_hashes) <= MAX_BLOCKS * _HASH_BYTES:
        yield event
        return
    for start in range(0, len(event.engine_hashes), MAX_BLOCKS * _HASH_BYTES):
        cut = slice(start, start + MAX_BLOCKS * _HASH_BYTES)
        piece = msgspec.structs.replace(event, engine_hashes=event.engine_hashes[cut])
        if isinstance(piece, IndexStored) and isinstance(event, IndexStored):
            last = int.from_bytes(event.engine_hashes[start - _HASH_BYTES : start], "little")
            piece = msgspec.structs.replace(
                piece, content_hashes=event.content_hashes[cut], parent=last if start else event.parent
            )
        yield piece


def _size(event: IndexEvent) -> int:
    if isinstance(event, IndexCleared):
        return _EVENT_BYTES
    contents = len(event.content_hashes) if isinstance(event, IndexStored) else 0
    return _EVENT_BYTES + len(event.engine_hashes) + contents
