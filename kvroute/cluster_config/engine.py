"""Configuration lines of a vLLM engine: event ports per DP rank, hash seed, topic, registration."""

import json
from dataclasses import dataclass

from schemas.registry import MAX_BLOCK_SIZE, MAX_DP_RANK

MAX_PORT = 65_535


class SetupError(ValueError):
    """A setup that cannot work; `field` names the option and the text says what to change."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What the operator knows. Each DP rank adds its number to both ports (vLLM 0.9.1 and later)."""

    model: str
    instance_id: str
    host: str
    block_size: int = 128
    dp_size: int = 1
    first_rank: int = 0
    event_port: int = 5557
    replay_port: int = 6667
    topic: str = "kv-events"
    store_backend: str = "Memcache"
    buffer_steps: int = 10_000
    hash_seed: str = "0"


def check_engine(setup: EngineSetup) -> None:
    """Raise SetupError for the first thing in the setup that cannot work."""
    for field in ("model", "instance_id", "host"):
        if not getattr(setup, field).strip():
            raise SetupError(field, "must not be empty")
    if setup.host in {"*", "0.0.0.0", "::", "[::]"}:
        raise SetupError("host", f"{setup.host} is an address to listen on; give the address that kvroute connects to")
    if not 1 <= setup.block_size <= MAX_BLOCK_SIZE:
        raise SetupError("block_size", f"must be from 1 to {MAX_BLOCK_SIZE}, got {setup.block_size}")
    if setup.dp_size < 1 or setup.first_rank < 0 or setup.first_rank + setup.dp_size - 1 > MAX_DP_RANK:
        raise SetupError("dp_size", f"ranks must lie between 0 and {MAX_DP_RANK}")
    last_rank = setup.first_rank + setup.dp_size - 1
    for field, port in (("event_port", setup.event_port), ("replay_port", setup.replay_port)):
        if port < 1 or port + last_rank > MAX_PORT:
            raise SetupError(field, f"ports {port} to {port + last_rank} must lie between 1 and {MAX_PORT}")
    distance = abs(setup.event_port - setup.replay_port)
    if distance <= last_rank:
        raise SetupError(
            "replay_port",
            f"rank r listens on event_port + r and replay_port + r, so with ranks up to {last_rank} the two must be "
            f"more than {last_rank} apart; they are {distance} apart (for example 6667 beside 5557)",
        )
    if not setup.hash_seed.isdecimal() or int(setup.hash_seed) > 4_294_967_295:
        raise SetupError("hash_seed", f"PYTHONHASHSEED must be a number from 0 to 4294967295, got {setup.hash_seed!r}")


def kv_events_config(setup: EngineSetup) -> str:
    """The value of ``--kv-events-config``."""
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{setup.event_port}",
            "replay_endpoint": f"tcp://*:{setup.replay_port}",
            "buffer_steps": setup.buffer_steps,
            "topic": setup.topic,
        }
    )


def registrations(setup: EngineSetup) -> list[dict[str, object]]:
    """One ``POST /register`` body per DP rank, with that rank's own ports."""
    host = f"[{setup.host}]" if ":" in setup.host else setup.host
    return [
        {
            "instance_id": setup.instance_id,
            "type": "vLLM",
            "modelname": setup.model,
            "block_size": setup.block_size,
            "dp_rank": rank,
            "store_backend": setup.store_backend,
            "medium_endpoints": {"npu": f"tcp://{host}:{setup.event_port + rank}"},
            "replay_endpoint": f"tcp://{host}:{setup.replay_port + rank}",
        }
        for rank in range(setup.first_rank, setup.first_rank + setup.dp_size)
    ]


def engine_lines(setup: EngineSetup, router: str) -> str:
    """The lines to copy, with a comment each. Raises SetupError."""
    check_engine(setup)
    last_rank = setup.first_rank + setup.dp_size - 1
    lines = [
        "# environment of every process of the engine; equal on all engines that share a pool,",
        "# or the pool's hashes cannot be joined with the engines' (vLLM before 0.29 draws a random seed)",
        f"export PYTHONHASHSEED={setup.hash_seed}",
        "",
        "# arguments of vLLM",
        f"--block-size {setup.block_size} \\",
        "--enable-prefix-caching \\",
        f"--kv-events-config '{kv_events_config(setup)}'",
        "",
        f"# ports: events {setup.event_port + setup.first_rank}-{setup.event_port + last_rank}, "
        f"replay {setup.replay_port + setup.first_rank}-{setup.replay_port + last_rank} (one per DP rank)",
        "# registration, unless a controller does it",
    ]
    lines.extend(
        f"curl -sS -X POST {router}/register -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        for body in registrations(setup)
    )
    return "\n".join(lines)
