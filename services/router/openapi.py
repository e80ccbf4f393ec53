"""The OpenAPI description of the router and a page that shows it without any outside script."""

import html
import json
from typing import Any

from kvroute import __version__
from schemas.http import (
    REGISTRATION_PROPERTIES,
    REGISTRATION_REQUIRED,
    UNREGISTRATION_PROPERTIES,
    UNREGISTRATION_REQUIRED,
)

_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_ERROR = {"description": '`{"error": text}` naming the field and the fix'}
_NAMESPACE = {
    "tenant_id": {"type": "string", "default": "default"},
    "lora_name": {"type": "string"},
    "lora_id": {"type": "integer", "description": "only for engines that do not send adapter names"},
    "cache_salt": {"type": "string"},
    "extra_keys": {
        "type": "array",
        "description": "keys of the whole chain as texts; or a list (or null) per block, as in events",
    },
    "block_extra_keys": {"type": "object", "description": "block number to its keys (images and the like)"},
    "instance_id": {"type": "string", "description": "answer for this instance only"},
    "dialect": {
        "type": "string",
        "enum": ["conductor", "mooncake"],
        "description": "shape of the answer; mooncake where all engines were registered in that spelling",
    },
}
_HASH_QUERY = {
    "model": {"type": "string"},
    "block_hashes": {**_INTEGERS, "description": "content hash of every block"},
    "seq_hashes": {**_INTEGERS, "description": "rolling hashes, instead of block_hashes; also called block_hash"},
    "block_size": {"type": "integer", "description": "scales matched_tokens; 1 when missing"},
    **_NAMESPACE,
}
_QUERY = {
    "model": {"type": "string"},
    "block_size": {"type": "integer", "minimum": 1, "maximum": 4096},
    "token_ids": {**_INTEGERS, "description": "in msgpack also bytes: little-endian u32"},
    **_NAMESPACE,
}


def _body(properties: dict[str, Any], required: list[str], raw: bool = False) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    content: dict[str, Any] = {"application/json": {"schema": schema}, "application/msgpack": {"schema": schema}}
    if raw:
        content["application/octet-stream"] = {
            "schema": {
                "type": "string",
                "format": "binary",
                "description": "tokens as LE u32; the rest in the query string",
            }
        }
    return {"required": True, "content": content}


def _post(summary: str, body: dict[str, Any], answers: dict[str, str]) -> dict[str, Any]:
    responses: dict[str, Any] = {status: {"description": text} for status, text in answers.items()}
    responses.setdefault("400", _ERROR)
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _get(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": "ok"}}}}


OPENAPI: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "kvroute router", "version": __version__, "license": {"name": "Apache-2.0"}},
    "paths": {
        "/query": _post(
            "Which instances have how much of this prompt, per DP rank and medium",
            _body(_QUERY, ["model", "block_size", "token_ids"], raw=True),
            {
                "200": "tenant -> instance -> longest_matched, DP",
                "404": "no index for model and tenant",
                "413": "too large",
            },
        ),
        "/query_by_hash": _post(
            "The same for block hashes",
            _body(_HASH_QUERY, ["model"]),
            {"200": "as /query", "404": "no index for model and tenant", "413": "too large"},
        ),
        "/register": _post(
            "Register an engine's DP rank or a pool (idempotent)",
            _body(REGISTRATION_PROPERTIES, REGISTRATION_REQUIRED),
            {"201": "registered", "409": "endpoint taken", "422": "fields refused, all named"},
        ),
        "/unregister": _post(
            "Remove an engine's DP rank or a pool",
            _body(UNREGISTRATION_PROPERTIES, UNREGISTRATION_REQUIRED),
            {"200": "removed", "404": "unknown instance", "409": "generation is of an earlier life"},
        ),
        "/events": _post(
            "Events over HTTP instead of ZMQ",
            _body(
                {"instance_id": {"type": "string"}, "events": {"type": "array", "items": {"type": "object"}}},
                ["instance_id"],
            ),
            {"200": "applied", "500": "partial: the good events are applied, the others listed"},
        ),
        "/v1/feedback": _post(
            "What an engine really had cached for a request, beside what was promised",
            _body(
                {
                    "instance_id": {"type": "string"},
                    "dp_rank": {"type": "integer", "default": 0},
                    "promised_tokens": {"type": "integer", "description": "matched_tokens of the answer to the query"},
                    "cached_tokens": {"type": "integer", "description": "of the response's usage"},
                    "prompt_tokens": {"type": "integer", "description": "of the response's usage"},
                    "receipt_id": {"type": "string", "description": "instead of instance, rank and promise"},
                    "responses": {"type": "array", "items": {"type": "object"}, "description": "several at once"},
                },
                ["cached_tokens"],
            ),
            {"200": "taken, unknown: how many were counted", "404": "unknown receipt", "413": "too large"},
        ),
        "/workers": _get("Registrations and what the index holds for each"),
        "/health": _get("The text OK"),
        "/livez": _get("Liveness"),
        "/readyz": _get("Readiness with reasons; 503 when not ready"),
        "/metrics": _get("Prometheus metrics"),
    },
}

DOCS_PAGE = (
    "<!doctype html><meta charset=utf-8><title>kvroute router</title>"
    "<style>body{font:16px sans-serif;max-width:60rem;margin:2rem auto}pre{background:#f4f4f4;padding:1rem;"
    "overflow:auto}</style><h1>kvroute router</h1><p>OpenAPI: <a href=/openapi.json>/openapi.json</a></p>"
    + "".join(
        f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>"
        f"<pre>{html.escape(json.dumps({name: operation[name] for name in operation if name != 'summary'}, indent=1))}"
        "</pre>"
        for path, methods in OPENAPI["paths"].items()
        for method, operation in methods.items()
    )
)
