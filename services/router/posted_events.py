"""POST /events: events that come over HTTP instead of ZMQ, turned into index batches (pure).

Body and answers as in the service this one replaces (docs/compatibility.md). A bad event costs itself only; an unknown
event type is an error, never a clear.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.blocks import U64_MASK, Tier, content_hashes, namespace_root, tier_of_medium, token_bytes
from schemas.events import (
    MAX_BLOCKS_PER_EVENT,
    WIRE_VERSION,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexRemoved,
    IndexStored,
    Worker,
)
from schemas.registry import DEFAULT_TENANT, MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME, EngineRecord
from services.router.encodings import BodyRefusedError
from services.router.publishers import Publishers

MAX_EVENTS = 65_536
MAX_ERRORS = 100
_KINDS = ("removed", "stored", "cleared")
_ALL_TIERS = (Tier.NPU, Tier.CPU, Tier.DISK)


@dataclass(frozen=True, slots=True)
class Posted:
    """What a body asks for: the good events by space and in order of dp_rank, and some errors of the others."""

    batches: tuple[IndexBatch, ...]
    applied: int
    errors: tuple[str, ...]
    refused: int = 0


class _Instance:
    """Who posts: registered or not. Events of an unregistered one need the model's name in the body."""

    def __init__(self, body: Mapping[str, Any], engines: Mapping[tuple[str, int], EngineRecord]) -> None:
        self.instance_id = _name(body, "instance_id") or ""
        if not self.instance_id:
            raise BodyRefusedError("invalid events request body: missing field instance_id", 422)
        self._model = _name(body, "model_name")
        self._tenant = _name(body, "tenant_id")
        self.block_size = body.get("block_size")
        self._ranks = {rank: engine for (name, rank), engine in engines.items() if name == self.instance_id}

    def record(self, dp_rank: int) -> EngineRecord | None:
        """The registration of a rank."""
        return self._ranks.get(dp_rank)

    def space(self, dp_rank: int) -> tuple[str, str]:
        """Model and tenant of a rank's events. Raises BodyRefusedError when nothing tells the model."""
        record = self._ranks.get(dp_rank) or next(iter(self._ranks.values()), None)
        model = self._model or (record.model if record else None)
        if model is None:
            raise BodyRefusedError(f"instance {self.instance_id} not found; register it or give model_name")
        return model, self._tenant or (record.tenant if record else DEFAULT_TENANT)


def read_posted_events(
    body: Mapping[str, Any],
    engines: Mapping[tuple[str, int], EngineRecord],
    publishers: Publishers,
    now: float | None = None,
) -> Posted:
    """Turn a body into batches. Raises BodyRefusedError for a body without usable instance or events list."""
    instance = _Instance(body, engines)
    events = body.get("events", [])
    if not isinstance(events, list):
        raise BodyRefusedError("invalid events request body: events must be a list of events", 422)
    if len(events) > MAX_EVENTS:
        raise BodyRefusedError(f"events has {len(events)} entries, at most {MAX_EVENTS} are accepted", 413)
    errors: list[tuple[int, str]] = []
    good: dict[tuple[str, str], dict[int, list[IndexEvent]]] = {}
    applied = 0
    for event in events:
        rank = 0
        try:
            if not isinstance(event, dict):
                raise BodyRefusedError("an event must be an object")
            rank = _rank(event)
            made = _read_event(event, instance, rank)
            good.setdefault(instance.space(rank), {}).setdefault(rank, []).append(made)
            applied += 1
        except BodyRefusedError as error:
            errors.append((rank, str(error)))
    moment = time.time() if now is None else now
    batches = []
    for (model, tenant), ranks in good.items():
        groups = [
            IndexGroup(
                0, "engine", instance.instance_id, rank, _generation(instance, rank, publishers), 0, 0, moment, made
            )
            for rank, made in sorted(ranks.items())
        ]
        batches.append(IndexBatch(WIRE_VERSION, model, tenant, groups))
    return Posted(tuple(batches), applied, _error_texts(errors), len(errors))


def _generation(instance: _Instance, rank: int, publishers: Publishers) -> int:
    """The registration's generation; without one a number that passes its tombstone and fences nothing off."""
    record = instance.record(rank)
    key = ("engine", instance.instance_id, rank)
    if record is not None:
        return max(record.generation, publishers.get(key).generation)
    retired = publishers.retired_generation(key)
    return retired + 1 if retired else publishers.get(key).generation


def _error_texts(errors: list[tuple[int, str]]) -> tuple[str, ...]:
    texts = [f"dp_rank={rank}: {text}" for rank, text in sorted(errors, key=lambda error: error[0])[:MAX_ERRORS]]
    if len(errors) > MAX_ERRORS:
        texts.append(f"and {len(errors) - MAX_ERRORS} more")
    return tuple(texts)


def _name(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > MAX_NAME:
        problem = f"{name} must be text of at most {MAX_NAME} characters"
        raise BodyRefusedError(f"invalid events request body: {problem}", 422)
    return value


def _rank(event: Mapping[str, Any]) -> int:
    nested = event.get("data")
    value = event.get("dp_rank")
    if value is None and isinstance(nested, dict):
        value = nested.get("dp_rank")
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_DP_RANK:
        raise BodyRefusedError(f"dp_rank must be an integer from 0 to {MAX_DP_RANK}, got {str(value)[:40]!r}")
    return value


def _read_event(event: Mapping[str, Any], instance: _Instance, rank: int) -> IndexEvent:
    if not isinstance(event.get("event_id"), int):
        raise BodyRefusedError("event_id is missing (an unsigned integer)")
    nested = event.get("data")
    fields = {**event, **nested} if isinstance(nested, dict) else event
    worker = Worker(instance.instance_id, rank)
    kind, clears_npu = _kind(fields)
    tier = _tier(fields.get("medium"))
    if kind == "cleared":
        return IndexCleared(worker, (tier,) if fields.get("medium") or clears_npu else _ALL_TIERS)
    blocks = fields.get("blocks")
    hashes = _block_hashes(fields, blocks)
    if len(hashes) > MAX_BLOCKS_PER_EVENT:
        raise BodyRefusedError(f"{len(hashes)} blocks in one event, at most {MAX_BLOCKS_PER_EVENT} are accepted")
    if kind == "removed":
        return IndexRemoved(worker, tier, hashes.tobytes())
    parent = fields.get("parent_hash", fields.get("parent_block_hash"))
    if parent is not None:
        if not isinstance(parent, int) or isinstance(parent, bool):
            raise BodyRefusedError("parent_hash must be an integer or null")
        parent &= U64_MASK
    if len(set(hashes)) < len(hashes) or parent in hashes:
        raise BodyRefusedError("one hash names two blocks of the chain")
    record = instance.record(rank)
    contents, block_size = _contents(fields, blocks, instance, record)
    if len(contents) < len(hashes):
        raise BodyRefusedError(f"{len(hashes)} block hashes but content for {len(contents)} whole blocks")
    return IndexStored(
        worker,
        tier,
        hashes.tobytes(),
        parent,
        contents[: len(hashes)].tobytes(),
        _root(fields, record),
        block_size,
    )


def _kind(fields: Mapping[str, Any]) -> tuple[str, bool]:
    """The kind of an event, and whether it is vLLM's AllBlocksCleared, which speaks of the NPU alone."""
    text = fields.get("event_type") or fields.get("type")
    if text is None:
        raise BodyRefusedError("event_type is missing (stored, removed or cleared)")
    lowered = str(text)[:40].lower()
    for kind in _KINDS:
        if kind in lowered:
            return kind, lowered == "allblockscleared"
    raise BodyRefusedError(f"event_type {str(text)[:40]!r} is unknown; use stored, removed or cleared")


def _tier(medium: object) -> Tier:
    if medium is None or medium == "":
        return Tier.NPU
    tier = tier_of_medium(medium) if isinstance(medium, str) else None
    if tier is None:
        raise BodyRefusedError(f"medium {str(medium)[:40]!r} is unknown; use npu, cpu or disk")
    return tier


def _integers(values: list[Any], name: str) -> array[int]:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise BodyRefusedError(f"{name} must contain integers only")
    return array("Q", [value & U64_MASK for value in values])


def _of_blocks(blocks: list[Any], name: str) -> array[int]:
    if not all(isinstance(block, dict) and isinstance(block.get(name), int) for block in blocks):
        raise BodyRefusedError(f"every entry of blocks needs an integer {name}")
    return _integers([block[name] for block in blocks], name)


def _block_hashes(fields: Mapping[str, Any], blocks: object) -> array[int]:
    if isinstance(blocks, list):
        return _of_blocks(blocks, "block_hash")
    for name in ("seq_hashes", "block_hashes"):
        value = fields.get(name)
        if isinstance(value, list) and value:
            return _integers(value, name)
    raise BodyRefusedError("block hashes are missing (blocks, seq_hashes or block_hashes, as lists)")


def _contents(
    fields: Mapping[str, Any], blocks: object, instance: _Instance, record: EngineRecord | None
) -> tuple[array[int], int]:
    """Content hashes and block size (0 where blocks bring their hashes along)."""
    if isinstance(blocks, list):
        return _of_blocks(blocks, "tokens_hash"), 0
    tokens = fields.get("token_ids")
    if not isinstance(tokens, list) or not tokens:
        raise BodyRefusedError("content is missing: give blocks with tokens_hash, or token_ids with block_size")
    block_size = fields.get("block_size", instance.block_size)
    if block_size is None and record is not None:
        block_size = record.block_size
    if not isinstance(block_size, int) or isinstance(block_size, bool) or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise BodyRefusedError(f"block_size must be an integer from 1 to {MAX_BLOCK_SIZE}")
    if record is not None and block_size != record.block_size:
        raise BodyRefusedError(f"block_size {block_size} in the event, {record.block_size} in the registration")
    try:
        return content_hashes(token_bytes(tokens), block_size), block_size
    except TypeError:
        raise BodyRefusedError("token_ids must contain integers only") from None


def _root(fields: Mapping[str, Any], record: EngineRecord | None) -> int:
    """The namespace of a chain: what the event names, else what its engine is registered with."""
    lora_id = fields.get("lora_id")
    if lora_id is not None and (not isinstance(lora_id, int) or isinstance(lora_id, bool)):
        raise BodyRefusedError("lora_id must be an integer")
    lora_name = _name(fields, "lora_name") or (record.lora_name if record is not None and lora_id is None else None)
    salt = _name(fields, "additional_salt") or (record.additional_salt if record is not None else None)
    return namespace_root(lora_name, _name(fields, "cache_salt"), (salt,) if salt else (), lora_id)
