"""GET /workers: registrations as existing controllers compare them, with what the index holds for each."""

import time
from typing import Any

from schemas.events import Worker
from schemas.registry import EngineRecord, PoolRecord
from services.router.budget import coverage
from services.router.feedback import Drift, Feedback
from services.router.publishers import same_space
from services.router.spaces import Spaces


def workers_answer(spaces: Spaces, feedback: Feedback, now: float | None = None) -> dict[str, Any]:
    """The body of /workers (a fresh, plain structure). now: seconds since the epoch."""
    moment = time.time() if now is None else now
    instances: dict[str, dict[str, Any]] = {}
    for _, engine in sorted(spaces.registry.engines.items()):
        entry = instances.setdefault(engine.instance_id, _instance(engine))
        entry["endpoints"][str(engine.dp_rank)] = _engine_endpoint(spaces, engine, moment) | {
            "feedback": _drift(feedback.of((engine.instance_id, engine.dp_rank)))
        }
    for _, pool in sorted(spaces.registry.pools.items()):
        entry = instances.setdefault(pool.instance_id, _instance(pool))
        entry["endpoints"][str(pool.dp_rank)] = _pool_endpoint(spaces, pool, moment)
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


def _freshness(spaces: Spaces, record: EngineRecord | PoolRecord, now: float) -> dict[str, Any]:
    """How far this publisher has been followed. A long silence is not a fault: an idle engine says nothing."""
    key = (record.kind, record.instance_id, record.dp_rank)
    publisher = spaces.publishers.get(key)
    heard = publisher.last_seq >= 0
    return {
        "generation": publisher.generation or record.generation,
        "last_seq": publisher.last_seq if heard else None,
        "last_event_at": publisher.last_event_at if heard else None,
        "seconds_since_last_event": round(max(0.0, now - publisher.last_event_at), 3) if heard else None,
        "events": publisher.events,
        "stream": spaces.standings.answer(*key),
    }


def _engine_endpoint(spaces: Spaces, engine: EngineRecord, now: float) -> dict[str, Any]:
    space = spaces.spaces.get((engine.model, engine.tenant))
    npu, cpu, disk, waiting = (0, 0, 0, 0)
    if space is not None:
        npu, cpu, disk, waiting = space.blocks_of(Worker(engine.instance_id, engine.dp_rank))
    return {
        "medium_endpoints": {str(tier): url for tier, url in engine.endpoints.items()},
        "engine_type": engine.engine_type,
        "url": engine.url,
        "dp_rank": engine.dp_rank,
        "replay_endpoint": engine.replay_endpoint,
        "block_size": engine.block_size,
        "paused": engine.paused,
        **_freshness(spaces, engine, now),
        "npu_blocks": npu,
        "cpu_blocks": cpu,
        "disk_blocks": disk,
        "waiting_blocks": waiting,
    }


def _drift(drift: Drift) -> dict[str, Any]:
    """What responses have told of the promises made for a rank."""
    return {
        "responses": drift.responses,
        "false_hit_rate": round(drift.false_hit_rate, 6),
        "false_miss_rate": round(drift.false_miss_rate, 6),
    }


def _pool_endpoint(spaces: Spaces, pool: PoolRecord, now: float) -> dict[str, Any]:
    locations: dict[str, dict[str, int]] = {}
    for space in spaces.spaces.values():
        for location in space.locations_of(pool.instance_id):
            _, cpu, disk, waiting = space.blocks_of(location)
            counts = locations.setdefault(location.backend_id, {"cpu_blocks": 0, "disk_blocks": 0, "waiting_blocks": 0})
            counts["cpu_blocks"] += cpu
            counts["disk_blocks"] += disk
            counts["waiting_blocks"] += waiting
    return {
        "medium_endpoints": {"cpu": pool.endpoint, "disk": pool.endpoint},
        "engine_type": pool.engine_type,
        "dp_rank": pool.dp_rank,
        "replay_endpoint": None,
        "endpoint": pool.endpoint,
        "block_size": pool.block_size,
        **_freshness(spaces, pool, now),
        "cpu_blocks": sum(counts["cpu_blocks"] for counts in locations.values()),
        "disk_blocks": sum(counts["disk_blocks"] for counts in locations.values()),
        "waiting_blocks": sum(counts["waiting_blocks"] for counts in locations.values()),
        "locations": locations,
    }


def _space(spaces: Spaces, key: tuple[str, str]) -> dict[str, Any]:
    model, tenant = key
    stats = spaces.spaces[key].index.stats()
    return {
        "model_name": model,
        "tenant_id": tenant,
        "worker_count": sum(same_space(engine, key) for engine in spaces.registry.engines.values()),
        "total_blocks": stats.blocks,
        "memberships": stats.memberships,
        "waiting_blocks": stats.waiting,
        "evicted_blocks": stats.evicted,
        "unknown_names": stats.unknown_names,
        "unknown_removals": stats.unknown_removals,
        "renamed": stats.renamed,
        "bytes": stats.bytes,
        "coverage": round(coverage(stats.memberships, stats.forgotten), 6),
    }
