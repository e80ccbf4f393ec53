"""Starts a memcache MetaService from the environment; needs the packages memcache-hybrid and memfabric-hybrid.

POD_IP                     address to serve on (required)
KV_CACHE_STORE_PORT        business port, default 50088
MMC_CONFIG_STORE_PORT      config store port, default 50089
KV_STORE_METRICS_PORT      metrics port, default 50090
KV_EVENTS_ENABLE           "true" switches KV events on; off by default
KV_EVENTS_ENDPOINT         ZMQ bind address, default tcp://0.0.0.0:5557
KV_EVENTS_MODEL_NAME       the engines' served model name (required with events)
KV_EVENTS_BLOCK_SIZE       the engines' --block-size (required with events)
KV_EVENTS_TENANT_ID        default "default"
KV_EVENTS_HASH_AS_INT      default "true"
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

TRUE = {"1", "true", "yes", "on"}


def settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """MetaConfig attributes from the environment. Raises ValueError naming the variable."""

    def port(name: str, default: int) -> int:
        text = environment.get(name) or str(default)
        if not text.isdecimal() or not 1 <= int(text) <= 65535:
            raise ValueError(f"{name} must be a port from 1 to 65535, got {text!r}")
        return int(text)

    host = environment.get("POD_IP", "")
    if not host:
        raise ValueError("POD_IP is not set; give the Pod its own address (fieldPath: status.podIP)")
    host = f"[{host}]" if ":" in host else host
    values: dict[str, Any] = {
        "meta_service_url": f"tcp://{host}:{port('KV_CACHE_STORE_PORT', 50088)}",
        "config_store_url": f"tcp://{host}:{port('MMC_CONFIG_STORE_PORT', 50089)}",
        "metrics_url": f"http://{host}:{port('KV_STORE_METRICS_PORT', 50090)}",
        "ha_enable": False,
        "log_level": "info",
        "log_output_target": "screen",
    }
    if environment.get("KV_EVENTS_ENABLE", "").lower() not in TRUE:
        return values
    model_name = environment.get("KV_EVENTS_MODEL_NAME", "")
    if not model_name:
        raise ValueError("KV_EVENTS_MODEL_NAME is not set; it must be the model name that the engines serve")
    block_size = environment.get("KV_EVENTS_BLOCK_SIZE", "")
    if not block_size.isdecimal() or not 1 <= int(block_size) <= 4096:
        raise ValueError(f"KV_EVENTS_BLOCK_SIZE must be the engines' --block-size (1 to 4096), got {block_size!r}")
    return values | {
        "kv_events_enable": True,
        "kv_events_endpoint": environment.get("KV_EVENTS_ENDPOINT") or "tcp://0.0.0.0:5557",
        "kv_events_model_name": model_name,
        "kv_events_block_size": int(block_size),
        "kv_events_tenant_id": environment.get("KV_EVENTS_TENANT_ID") or "default",
        "kv_events_hash_as_int": (environment.get("KV_EVENTS_HASH_AS_INT") or "true").lower() in TRUE,
    }


def main() -> int:
    """Configure and run the MetaService until it is stopped; exit code 2 for a wrong environment."""
    try:
        values = settings(os.environ)
    except ValueError as error:
        print(f"meta_service: {error}", file=sys.stderr)
        return 2
    from memcache_hybrid import MetaConfig, MetaService

    config = MetaConfig()
    for name, value in values.items():
        setattr(config, name, value)
    MetaService.setup(config)
    MetaService.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
