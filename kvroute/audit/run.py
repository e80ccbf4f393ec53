"""Asks router and engines, and compares."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

from kvroute.audit.comparison import Finding, compared, from_feedback

TIMEOUT_SECONDS = 30.0
AT_ONCE = 16
CACHE_PATH = "/sim/cache"


class AuditError(RuntimeError):
    """The router cannot be asked; the text says why."""


async def audit(router_url: str, settle: float) -> list[Finding]:
    """Every registered engine rank. settle: seconds after which a rank that differs is looked at once more, because its
    last events may still be on their way. Raises AuditError."""
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False) as http:
        findings = await _look(http, router_url, None)
        differing = {
            (one.instance_id, one.dp_rank) for one in findings if one.measured_by == "cache" and one.worst_rate
        }
        if differing and settle:
            await asyncio.sleep(settle)
            again = {(one.instance_id, one.dp_rank): one for one in await _look(http, router_url, differing)}
            findings = [again.get((one.instance_id, one.dp_rank), one) for one in findings]
        return findings


async def _look(http: httpx.AsyncClient, router_url: str, wanted: set[tuple[str, int]] | None) -> list[Finding]:
    ranks = [
        (worker, int(rank), endpoint)
        for worker in (await _get(http, f"{router_url}/workers"))["workers"]
        if worker["kind"] == "engine"
        for rank, endpoint in worker["endpoints"].items()
        if wanted is None or (worker["instance_id"], int(rank)) in wanted
    ]
    limit = asyncio.Semaphore(AT_ONCE)
    return list(await asyncio.gather(*(_audit_rank(http, router_url, limit, *rank) for rank in ranks)))


async def _audit_rank(
    http: httpx.AsyncClient,
    router_url: str,
    limit: asyncio.Semaphore,
    worker: Mapping[str, Any],
    rank: int,
    endpoint: Mapping[str, Any],
) -> Finding:
    name = worker["instance_id"]
    truth = await _truth(http, endpoint.get("url"), rank)
    if truth is None:
        return from_feedback(name, rank, endpoint)

    async def promised(chain: Mapping[str, Any]) -> int:
        query = {
            "model": worker["model_name"],
            "tenant_id": worker["tenant_id"],
            "block_size": truth["block_size"],
            "instance_id": name,
            "dialect": "conductor",
            "token_ids": chain["token_ids"],
        }
        query |= {key: chain[key] for key in ("cache_salt", "lora_name") if chain.get(key)}
        async with limit:
            answer = await http.post(f"{router_url}/query", json=query)
        if answer.is_error:
            raise AuditError(f"{router_url}/query: {answer.status_code} {answer.text[:200]}")
        instances = answer.json()[worker["tenant_id"]]
        return int(instances[name]["DP"][str(rank)]["npu_blocks"]) if name in instances else 0

    found = await asyncio.gather(*(promised(chain) for chain in truth["chains"]))
    return compared(name, rank, endpoint, truth, found)


async def _truth(http: httpx.AsyncClient, url: str | None, rank: int) -> dict[str, Any] | None:
    """What an engine holds, None when it does not say (a real engine, or one that does not answer)."""
    if not url:
        return None
    try:
        answer = await http.get(url.rstrip("/") + CACHE_PATH, headers={"x-data-parallel-rank": str(rank)})
        body = answer.json() if answer.is_success else None
    except (httpx.HTTPError, ValueError):
        return None
    return body if isinstance(body, dict) and {"chains", "blocks", "block_size", "unreachable"} <= body.keys() else None


async def _get(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    try:
        answer = await http.get(url)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise AuditError(f"{url}: {str(error) or type(error).__name__}") from None
    return body
