"""GET /workers: registrations as existing controllers compare them, with what the index holds for each."""

from typing import Any

from schemas.events import Worker
from schemas.registry import EngineRecord, PoolRecord
from services.router.spaces import Spaces


def workers_answer(spaces: Spaces) -> dict[str, Any]:
    """The body of /workers (a fresh, plain structure)."""
    instances: dict[str, dict[str, Any]] = {}
    for _, engine in sorted(spaces.registry.engines.items()):
        entry = instances.setdefault(engine.instance_id, _instance(engine))
        entry["endpoints"][str(engine.dp_rank)] = _engine_endpoint(spaces, engine)
    for _, pool in sorted(spaces.registry.pools.items()):
        entry = instances.setdefault(pool.instance_id, _instance(pool))
        entry["endpoints"][str(pool.dp_rank)] = _pool_endpoint(spaces, pool)
    return {"workers": list(instances.values()), "indexer": [_space(spaces, key) for key in sorted(spaces.spaces)]}


def _instance(record: EngineRecord | PoolRecord) -> dict[str, Any]:
    return {
        "instance_id": record.instance_id,
        "kind": record.kind,
        "model_name": record.model,
        "tenant_id": record.tenant,
        "block_size": record.block_size,
        "store_backend": record.store_backend,
        "endpoints": {},
    }


def _engine_endpoint(spaces: Spaces, engine: EngineRecord) -> dict[str, Any]:
    space = spaces.spaces.get((engine.model, engine.tenant))
    holder = spaces.holder_id(Worker(engine.instance_id, engine.dp_rank))
    npu, cpu, disk = space.index.holder_blocks(holder) if space is not None else (0, 0, 0)
    return {
        "medium_endpoints": {str(tier): url for tier, url in engine.endpoints.items()},
        "engine_type": engine.engine_type,
        "dp_rank": engine.dp_rank,
        "replay_endpoint": engine.replay_endpoint,
        "generation": engine.generation,
        "npu_blocks": npu,
        "cpu_blocks": cpu,
        "disk_blocks": disk,
    }


def _pool_endpoint(spaces: Spaces, pool: PoolRecord) -> dict[str, Any]:
    cpu = disk = 0
    locations = {}
    for space in spaces.spaces.values():
        for holder, location in space.locations.items():
            if location.pool_id == pool.instance_id:
                _, held_cpu, held_disk = space.index.holder_blocks(holder)
                locations[location.backend_id] = {"cpu_blocks": held_cpu, "disk_blocks": held_disk}
                cpu, disk = cpu + held_cpu, disk + held_disk
    return {
        "medium_endpoints": {"cpu": pool.endpoint, "disk": pool.endpoint},
        "engine_type": pool.engine_type,
        "dp_rank": pool.dp_rank,
        "replay_endpoint": None,
        "endpoint": pool.endpoint,
        "generation": pool.generation,
        "cpu_blocks": cpu,
        "disk_blocks": disk,
        "locations": locations,
    }


def _space(spaces: Spaces, key: tuple[str, str]) -> dict[str, Any]:
    model, tenant = key
    stats = spaces.spaces[key].index.stats()
    workers = [engine for engine in spaces.registry.engines.values() if (engine.model, engine.tenant) == key]
    return {
        "model_name": model,
        "tenant_id": tenant,
        "worker_count": len(workers),
        "total_blocks": stats.blocks,
        "memberships": stats.memberships,
        "waiting_blocks": stats.waiting,
        "bytes": stats.bytes,
    }
