"""Configuration lines of a memory pool: its event publisher, its owners' names, its registration."""

import json
from dataclasses import dataclass

from kvroute.cluster_config.engine import MAX_PORT, SetupError
from schemas.registry import MAX_BLOCK_SIZE

BACKENDS = {"memcache": "Memcache", "mooncake": "Mooncake"}


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """What the operator knows; `host` is the pool's master as kvroute reaches it (a Service name, an address)."""

    backend: str
    model: str
    host: str
    block_size: int = 128
    event_port: int = 5557
    metrics_port: int = 50090
    tenant: str = "default"


def check_pool(setup: PoolSetup) -> str:
    """The backend's canonical spelling. Raises SetupError for the first thing that cannot work."""
    backend = BACKENDS.get(setup.backend.strip().lower())
    if backend is None:
        raise SetupError("backend", f"must be one of {', '.join(sorted(BACKENDS))}, got {setup.backend!r}")
    for field in ("model", "host", "tenant"):
        if not getattr(setup, field).strip():
            raise SetupError(field, "must not be empty")
    if setup.host in {"*", "0.0.0.0", "::", "[::]"}:
        raise SetupError("host", f"{setup.host} is an address to listen on; give the one that kvroute connects to")
    if not 1 <= setup.block_size <= MAX_BLOCK_SIZE:
        raise SetupError("block_size", f"must be from 1 to {MAX_BLOCK_SIZE}, got {setup.block_size}")
    for field in ("event_port", "metrics_port"):
        if not 1 <= getattr(setup, field) <= MAX_PORT:
            raise SetupError(field, f"must be a port from 1 to {MAX_PORT}, got {getattr(setup, field)}")
    if setup.event_port == setup.metrics_port:
        raise SetupError("event_port", f"is the metrics port as well ({setup.metrics_port}); they must differ")
    return backend


def registration(setup: PoolSetup) -> dict[str, object]:
    """The ``POST /register`` body of the pool."""
    backend = check_pool(setup)
    host = f"[{setup.host}]" if ":" in setup.host else setup.host
    return {
        "instance_id": f"{backend.lower()}-pool",
        "type": "vLLM",
        "modelname": setup.model,
        "tenant_id": setup.tenant,
        "block_size": setup.block_size,
        "dp_rank": 0,
        "store_backend": backend,
        "endpoint": f"tcp://{host}:{setup.event_port}",
    }


def _memcache_lines(setup: PoolSetup) -> list[str]:
    return [
        "# mmc-meta.conf of the MetaService (restart it afterwards)",
        "ock.mmc.kv_events.enable = true",
        f"ock.mmc.kv_events.endpoint = tcp://0.0.0.0:{setup.event_port}",
        f"ock.mmc.kv_events.model_name = {setup.model}",
        f"ock.mmc.kv_events.block_size = {setup.block_size}",
        f"ock.mmc.kv_events.tenant_id = {setup.tenant}",
        "ock.mmc.kv_events.hash_as_int = true",
        "",
        "# mmc-local.conf of every LocalService: the address of its Pod, as in the engine's npu endpoint",
        "ock.mmc.local_service.backend_id = $POD_IP",
    ]


def _mooncake_lines(setup: PoolSetup) -> list[str]:
    return [
        "# arguments of mooncake_master",
        "--enable_kv_events=true \\",
        f"--kv_events_bind_endpoint tcp://0.0.0.0:{setup.event_port} \\",
        "--kv_events_backend_id $POD_IP \\",
        f"--metrics_port {setup.metrics_port}",
    ]


def pool_lines(setup: PoolSetup, router: str) -> str:
    """The lines to copy, with a comment each. Raises SetupError."""
    backend = check_pool(setup)
    lines = _memcache_lines(setup) if backend == "Memcache" else _mooncake_lines(setup)
    host = f"[{setup.host}]" if ":" in setup.host else setup.host
    lines += [
        "",
        "# environment of kvroute's coordinator",
        f"export KV_STORE_METRICS_URL=http://{host}:{setup.metrics_port}/metrics",
        "",
        "# registration, unless it stands in kvroute.yaml or a controller does it",
        f"curl -sS -X POST {router}/register -H 'Content-Type: application/json' "
        f"-d '{json.dumps(registration(setup))}'",
    ]
    return "\n".join(lines)
