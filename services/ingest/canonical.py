"""Wire events to canonical events: tokens become content hashes here and go no further.

Rules that the wire leaves open (design 3 and 4):

* A registration fixes the block size. A store that names another one, or whose tokens do not fill its blocks, is
  refused. A removal has no size and always passes.
* A store without tokens keeps an empty ``content_hashes``; its content is found by name later.
* The medium of an engine event defaults to its socket's tier; AllBlocksCleared touches the NPU alone.
* A pool never touches an engine's NPU: a clear without a medium means the pool tiers of the one location it names.
  Blocks in NPU memory that a pool owns belong to no tier of the index; their events are refused.
* A pool event that names no owner (shared storage has none) is about a location called like the pool itself: remote to
  every instance, and never mixed with a node's.
"""

from dataclasses import dataclass, field
from functools import lru_cache

from schemas.blocks import Tier, content_hashes, fold_block_extra, namespace_root, pack_hashes
from schemas.events import Cleared, Event, Removed, Stored
from schemas.registration import canonical_backend_id
from schemas.registry import EngineRecord
from schemas.wire.types import Rejected, RejectReason, WireCleared, WireEvent, WireRemoved, WireStored
from services.ingest.registrations import Publisher

_canonical_backend_id = lru_cache(maxsize=4096)(canonical_backend_id)


@dataclass(slots=True)
class Canonical:
    """What a wire batch became. Every wire event is in exactly one place.

    accepted: wire events behind ``events`` (a wire event may become several). blocks: in stores and removals of
    ``events``. block_size_seen: a size that disagreed, 0 for none.
    """

    events: list[Event] = field(default_factory=list)
    accepted: int = 0
    blocks: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    block_size_seen: int = 0


class _RefusedError(Exception):
    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def canonicalise(events: tuple[WireEvent, ...], publisher: Publisher) -> Canonical:
    """Translate the decoded events of one message; an event that has to be refused costs itself alone."""
    result = Canonical()
    for position, event in enumerate(events):
        try:
            if isinstance(event, WireStored):
                result.events.append(_stored(event, publisher))
                result.blocks += len(event.hashes)
            elif isinstance(event, WireRemoved):
                result.events.extend(_removed(event, publisher))
                result.blocks += len(event.hashes)
            else:
                result.events.append(_cleared(event, publisher))
        except _RefusedError as refused:
            result.rejected.append(Rejected(position, refused.reason, refused.detail))
            if refused.reason is RejectReason.BLOCK_SIZE_MISMATCH and isinstance(event, WireStored):
                result.block_size_seen = event.block_size
        else:
            result.accepted += 1
    return result


def _stored(event: WireStored, publisher: Publisher) -> Stored:
    record = publisher.record
    if event.block_size and event.block_size != record.block_size:
        raise _RefusedError(
            RejectReason.BLOCK_SIZE_MISMATCH,
            f"block_size {event.block_size} in the event, {record.block_size} in the registration of "
            f"{record.instance_id!r}: register the size that the publisher uses",
        )
    return Stored(
        tier=_tier(event.tier, publisher),
        engine_hashes=pack_hashes(event.hashes),
        parent=event.parent,
        content_hashes=_content(event, record.block_size) if event.token_ids else b"",
        root=_root(event, publisher),
        block_size=record.block_size if event.token_ids else event.block_size,
        backend_id=_location(event.backend_id, publisher),
        model=_unless(event.model, record.model),
        tenant=_unless(event.tenant, record.tenant),
    )


def _content(event: WireStored, block_size: int) -> bytes:
    tokens, blocks = len(event.token_ids), len(event.hashes)
    if tokens != blocks * block_size:
        raise _RefusedError(
            RejectReason.TOKEN_COUNT, f"{tokens} tokens for {blocks} blocks of {block_size}: only whole blocks count"
        )
    hashes = content_hashes(memoryview(event.token_ids), block_size)
    for index, keys in enumerate(event.block_keys):
        if keys and index < blocks:
            hashes[index] = fold_block_extra(hashes[index], keys)
    return hashes.tobytes()


def _root(event: WireStored, publisher: Publisher) -> int:
    record = publisher.record
    lora_name = event.lora_name
    extra_keys: tuple[str, ...] = ()
    if isinstance(record, EngineRecord):
        lora_name = lora_name or (record.lora_name if event.lora_id is None else None)
        if record.additional_salt:
            extra_keys = (record.additional_salt,)
    return namespace_root(lora_name, event.cache_salt, extra_keys, event.lora_id)


def _removed(event: WireRemoved, publisher: Publisher) -> list[Removed]:
    record = publisher.record
    tiers = publisher.tiers if event.tier is None else (_tier(event.tier, publisher),)
    engine_hashes = pack_hashes(event.hashes)
    return [
        Removed(
            tier=tier,
            engine_hashes=engine_hashes,
            backend_id=_location(event.backend_id, publisher),
            model=_unless(event.model, record.model),
            tenant=_unless(event.tenant, record.tenant),
        )
        for tier in tiers
    ]


def _cleared(event: WireCleared, publisher: Publisher) -> Cleared:
    record = publisher.record
    return Cleared(
        tiers=publisher.tiers if event.tier is None else (_tier(event.tier, publisher),),
        backend_id=_location(event.backend_id, publisher),
        model=_unless(event.model, record.model),
        tenant=_unless(event.tenant, record.tenant),
    )


def _tier(tier: Tier | None, publisher: Publisher) -> Tier:
    if tier is None:
        return publisher.tiers[0]
    if tier is Tier.NPU and publisher.dialect == "pool":
        raise _RefusedError(
            RejectReason.UNKNOWN_MEDIUM, "NPU memory of a pool is not a tier of the index: only its cpu and disk are"
        )
    return tier


def _location(backend_id: str, publisher: Publisher) -> str:
    """Where a pool put a block, in the spelling of registrations; an engine's own blocks lie with its worker."""
    if publisher.key.source != "pool":
        return ""
    return _canonical_backend_id(backend_id) if backend_id else publisher.record.instance_id


def _unless(name: str, own: str) -> str:
    return "" if name == own else name
