"""Request bodies of the registration API as JSON Schema, for the OpenAPI pages of the services that offer it.

The rules themselves are in schemas.registration; a test keeps the two lists of fields equal.
"""

from typing import Any

from schemas.registry import DEFAULT_TENANT, MAX_BLOCK_SIZE, MAX_DP_RANK, MAX_NAME, StoreBackend

_TEXT: dict[str, Any] = {"type": "string", "maxLength": MAX_NAME}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "maxItems": 64}

REGISTRATION_REQUIRED = ["instance_id", "type", "modelname", "block_size", "dp_rank"]
REGISTRATION_PROPERTIES: dict[str, dict[str, Any]] = {
    "instance_id": {**_TEXT, "description": "what answers name", "examples": ["vllm-prefill-1", "memcache-pool"]},
    "type": {**_TEXT, "description": "engine, in any case", "examples": ["vLLM", "SGLang", "Mooncake"]},
    "modelname": _TEXT,
    "model": {**_TEXT, "description": "instead of modelname"},
    "block_size": {"type": "integer", "minimum": 1, "maximum": MAX_BLOCK_SIZE},
    "dp_rank": {"type": "integer", "minimum": 0, "maximum": MAX_DP_RANK},
    "dp_size": {"type": "integer", "const": 1, "description": "a registration is one DP rank"},
    "medium_endpoints": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "ZMQ publisher by medium (npu, cpu, disk)",
        "examples": [{"npu": "tcp://10.0.0.5:5557"}],
    },
    "endpoint": {**_TEXT, "description": "a pool's publisher, or an engine's only one"},
    "store_backend": {**_TEXT, "default": StoreBackend.MOONCAKE, "examples": list(StoreBackend.ALL)},
    "replay_endpoint": {**_TEXT, "description": "the engine's replay socket"},
    "tenant_id": {**_TEXT, "default": DEFAULT_TENANT},
    "node_id": {**_TEXT, "description": "node of the instance"},
    "lora_name": _TEXT,
    "additionalsalt": _TEXT,
    "additional_salt": {**_TEXT, "description": "instead of additionalsalt"},
    "kind": {"type": "string", "enum": ["engine", "pool"], "description": "where the other fields are not to decide"},
    "host": {**_TEXT, "description": "address that wildcards stand for"},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535, "description": "with host: npu publisher of rank 0"},
    "url": {**_TEXT, "description": "HTTP base of the engine"},
    "role": {"type": "string", "examples": ["prefill", "decode", "union", "encode"]},
    "own_tiers": {**_TEXTS, "description": "tiers whose events are proof by themselves"},
    "offload": {"type": "boolean", "description": 'short for own_tiers ["cpu"]'},
    "backend_ids": {**_TEXTS, "description": "pool locations that are local to the instance"},
    "counted": {"type": "boolean", "default": True, "description": "stores of one block add up"},
}

UNREGISTRATION_REQUIRED = ["instance_id", "dp_rank"]
UNREGISTRATION_PROPERTIES = {
    name: REGISTRATION_PROPERTIES[name]
    for name in ("instance_id", "type", "modelname", "block_size", "dp_rank", "tenant_id", "lora_name")
} | {"generation": {"type": "integer", "description": "remove this life of the instance or an earlier one only"}}
