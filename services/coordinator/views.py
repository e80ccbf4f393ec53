"""The registry as ``GET /instances`` and ``GET /pools`` show it (pure)."""

from datetime import UTC, datetime
from typing import Any

from schemas.registry import EngineRecord, PoolRecord
from services.runtime.registry_store import Registry


def instances_view(registry: Registry, now: float) -> list[dict[str, Any]]:
    """Every registered instance with its ranks, in order of name. now: seconds since the epoch."""
    instances: dict[str, dict[str, Any]] = {}
    for (instance_id, rank), record in sorted(registry.engines.items()):
        instance = instances.setdefault(instance_id, _instance(record))
        instance["paused"] = instance["paused"] or record.paused
        instance["ranks"][str(rank)] = _rank(record, now)
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


def _life(record: EngineRecord | PoolRecord, now: float) -> dict[str, Any]:
    """generation, and since when this registration stands."""
    began = record.generation / 1000
    return {
        "generation": record.generation,
        "registered_at": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "age_seconds": round(max(0.0, now - began), 1),
    }
