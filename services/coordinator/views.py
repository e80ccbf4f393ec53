"""The registry as ``GET /instances`` and ``GET /pools`` show it (pure)."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from schemas.liveness import Liveness, LivenessState
from schemas.registry import EngineRecord, PoolRecord
from services.runtime.registry_store import Registry

LivenessOf = Callable[[str, int], Liveness | None]


def instances_view(registry: Registry, liveness_of: LivenessOf, now: float) -> list[dict[str, Any]]:
    """Every registered instance with its ranks, in order of name. now: seconds since the epoch."""
    instances: dict[str, dict[str, Any]] = {}
    for (instance_id, rank), record in sorted(registry.engines.items()):
        instance = instances.setdefault(instance_id, _instance(record))
        instance["paused"] = instance["paused"] or record.paused
        instance["ranks"][str(rank)] = _rank(record, now) | _health(liveness_of(instance_id, rank))
    return list(instances.values())


def pools_view(registry: Registry, now: float) -> list[dict[str, Any]]:
    """Every registered pool, in order of name."""
    return [
        {
            "instance_id": record.instance_id,
            "store_backend": record.store_backend,
            "model_name": record.model,
            "tenant_id": record.tenant,
            "block_size": record.block_size,
            "endpoint": record.endpoint,
            "origin": record.origin,
            **_life(record, now),
        }
        for _, record in sorted(registry.pools.items())
    ]


def _instance(record: EngineRecord) -> dict[str, Any]:
    return {
        "instance_id": record.instance_id,
        "model_name": record.model,
        "tenant_id": record.tenant,
        "block_size": record.block_size,
        "engine_type": record.engine_type,
        "store_backend": record.store_backend,
        "role": record.role,
        "origin": record.origin,
        "paused": False,
        "ranks": {},
    }


def _rank(record: EngineRecord, now: float) -> dict[str, Any]:
    return {
        "medium_endpoints": {str(tier): url for tier, url in record.endpoints.items()},
        "replay_endpoint": record.replay_endpoint,
        "url": record.url,
        "own_tiers": [str(tier) for tier in record.own_tiers],
        "backend_ids": list(record.backend_ids),
        "lora_name": record.lora_name,
        "node_id": record.node_id,
        "counted": record.counted,
        "paused": record.paused,
        **_life(record, now),
    }


def _health(liveness: Liveness | None) -> dict[str, Any]:
    """What the health checks say; unknown without a url, or while nobody checks."""
    if liveness is None:
        return {"health": "unknown", "health_reason": None}
    return {"health": str(liveness.state), "health_reason": liveness.reason or None}


def with_the_dead_paused(registry: Registry, liveness_of: LivenessOf) -> Registry:
    """The registry in which engines that do not answer take no new requests."""
    dead = {
        key: record.model_copy(update={"paused": True})
        for key, record in registry.engines.items()
        if (liveness := liveness_of(*key)) is not None and liveness.state is LivenessState.DEAD
    }
    return replace(registry, engines=registry.engines | dead) if dead else registry


def _life(record: EngineRecord | PoolRecord, now: float) -> dict[str, Any]:
    """generation, and since when this registration stands."""
    began = record.generation / 1000
    return {
        "generation": record.generation,
        "registered_at": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "age_seconds": round(max(0.0, now - began), 1),
    }
