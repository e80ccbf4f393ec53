"""POST /events: events that come over HTTP instead of ZMQ, turned into index batches (pure).

Body and answers as in the service this one replaces; an unknown event type is an error, never a clear.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.blocks import U64_MASK, Tier, content_hashes, tier_of_medium, token_bytes
from schemas.events import (
    WIRE_VERSION,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexRemoved,
    IndexStored,
    Worker,
)
from schemas.registry import DEFAULT_TENANT, MAX_BLOCK_SIZE, MAX_DP_RANK
from services.router.request_bodies import BodyRefusedError
from services.runtime.registry_store import Registry

MAX_EVENTS = 65_536
_KINDS = (("removed", "removed"), ("stored", "stored"), ("cleared", "cleared"))


@dataclass(frozen=True, slots=True)
class Posted:
    """What a body asks for: one batch with every good event in order of dp_rank, and the errors of the others."""

    batch: IndexBatch
    applied: int
    errors: tuple[str, ...]


def read_posted_events(body: Mapping[str, Any], registry: Registry, now: float | None = None) -> Posted:
    """Turn a body into a batch. Raises BodyRefusedError for a body without usable instance or events list."""
    instance_id = body.get("instance_id")
    if not isinstance(instance_id, str) or not instance_id:
        raise BodyRefusedError("invalid events request body: missing field instance_id", 422)
    events = body.get("events", [])
    if not isinstance(events, list):
        raise BodyRefusedError("invalid events request body: events must be a list of events", 422)
    if len(events) > MAX_EVENTS:
        raise BodyRefusedError(f"events has {len(events)} entries, at most {MAX_EVENTS} are accepted", 413)
    known = [engine for (name, _), engine in registry.engines.items() if name == instance_id]
    model = body.get("model_name") or (known[0].model if known else "")
    tenant = body.get("tenant_id") or (known[0].tenant if known else DEFAULT_TENANT)
    if not isinstance(model, str) or not isinstance(tenant, str):
        raise BodyRefusedError("invalid events request body: model_name and tenant_id must be text", 422)
    default_block_size = body.get("block_size")
    generations = {engine.dp_rank: engine.generation for engine in known}
    moment = time.time() if now is None else now
    errors: list[str] = []
    by_rank: dict[int, list[IndexEvent]] = {}
    applied = 0
    for event in events:
        rank = event.get("dp_rank", 0) if isinstance(event, dict) else 0
        rank = rank if isinstance(rank, int) and 0 <= rank <= MAX_DP_RANK else 0
        try:
            if not model:
                raise BodyRefusedError(f"instance {instance_id} not found; register it or give model_name")
            by_rank.setdefault(rank, []).extend(_read_event(event, Worker(instance_id, rank), default_block_size))
            applied += 1
        except BodyRefusedError as error:
            errors.append(f"dp_rank={rank}: {error}")
    groups = [
        IndexGroup(0, "engine", instance_id, rank, generations.get(rank, 0), 0, 0, moment, ranked)
        for rank, ranked in sorted(by_rank.items())
    ]
    return Posted(IndexBatch(WIRE_VERSION, model, tenant, groups), applied, tuple(errors))


def _read_event(event: object, worker: Worker, default_block_size: object) -> list[IndexEvent]:
    if not isinstance(event, dict):
        raise BodyRefusedError("an event must be an object")
    if not isinstance(event.get("event_id"), int):
        raise BodyRefusedError("event_id is missing (an unsigned integer)")
    nested = event.get("data")
    fields = {**event, **nested} if isinstance(nested, dict) else event
    kind = _kind(fields)
    tier = _tier(fields.get("medium"))
    if kind == "cleared":
        return [IndexCleared(worker, (tier,) if fields.get("medium") else (Tier.NPU, Tier.CPU, Tier.DISK))]
    blocks = fields.get("blocks")
    hashes = _block_hashes(fields, blocks)
    if kind == "removed":
        return [IndexRemoved(worker, tier, hashes.tobytes())]
    contents = _contents(fields, blocks, default_block_size)
    if len(contents) < len(hashes):
        raise BodyRefusedError(f"{len(hashes)} block hashes but content for {len(contents)} whole blocks")
    parent = fields.get("parent_hash", fields.get("parent_block_hash"))
    if parent is not None and (not isinstance(parent, int) or isinstance(parent, bool)):
        raise BodyRefusedError("parent_hash must be an integer or null")
    return [
        IndexStored(
            worker,
            tier,
            hashes.tobytes(),
            None if parent is None else parent & U64_MASK,
            contents[: len(hashes)].tobytes(),
        )
    ]


def _kind(fields: Mapping[str, Any]) -> str:
    text = fields.get("event_type") or fields.get("type")
    if text is None:
        raise BodyRefusedError("event_type is missing (stored, removed or cleared)")
    lowered = str(text).lower()
    for word, kind in _KINDS:
        if word in lowered:
            return kind
    raise BodyRefusedError(f"event_type {text!r} is unknown; use stored, removed or cleared")


def _tier(medium: object) -> Tier:
    if medium is None or medium == "":
        return Tier.NPU
    tier = tier_of_medium(medium) if isinstance(medium, str) else None
    if tier is None:
        raise BodyRefusedError(f"medium {medium!r} is unknown; use npu, cpu or disk")
    return tier


def _integers(value: object, name: str) -> array[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise BodyRefusedError(f"{name} must be a list of integers")
    return array("Q", [item & U64_MASK for item in value])


def _block_hashes(fields: Mapping[str, Any], blocks: object) -> array[int]:
    if isinstance(blocks, list):
        if not all(isinstance(block, dict) and isinstance(block.get("block_hash"), int) for block in blocks):
            raise BodyRefusedError("every entry of blocks needs an integer block_hash")
        return array("Q", [block["block_hash"] & U64_MASK for block in blocks])
    for name in ("seq_hashes", "block_hashes"):
        if fields.get(name):
            return _integers(fields[name], name)
    raise BodyRefusedError("block hashes are missing (blocks, seq_hashes or block_hashes)")


def _contents(fields: Mapping[str, Any], blocks: object, default_block_size: object) -> array[int]:
    if isinstance(blocks, list):
        if not all(isinstance(block.get("tokens_hash"), int) for block in blocks):
            raise BodyRefusedError("every entry of blocks needs an integer tokens_hash")
        return array("Q", [block["tokens_hash"] & U64_MASK for block in blocks])
    tokens = fields.get("token_ids")
    block_size = fields.get("block_size", default_block_size)
    if not isinstance(tokens, list) or not tokens:
        raise BodyRefusedError("content is missing: give blocks with tokens_hash, or token_ids with block_size")
    if not isinstance(block_size, int) or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise BodyRefusedError(f"block_size must be an integer from 1 to {MAX_BLOCK_SIZE}")
    try:
        return content_hashes(token_bytes(tokens), block_size)
    except TypeError:
        raise BodyRefusedError("token_ids must contain integers only") from None
