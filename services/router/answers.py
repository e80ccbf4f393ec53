"""From coverages to the answers of /query, in the shapes that existing callers read (docs/compatibility.md)."""

from collections.abc import Sequence
from typing import Any

from schemas.registry import EngineRecord
from services.router.index.port import Coverage
from services.router.standing import Standings

Answer = dict[str, dict[str, dict[str, Any]]]


def query_answer(
    tenant: str,
    engines: Sequence[EngineRecord],
    coverages: Sequence[Coverage],
    block_size: int,
    standings: Standings,
) -> Answer:
    """Per tenant and instance: every registered instance, those without a hit with zeros.

    Beside each: how its streams stand, per rank.
    """
    instances: dict[str, dict[str, Any]] = {}
    for engine, coverage in zip(engines, coverages, strict=True):
        instance = instances.setdefault(engine.instance_id, {"longest_matched": 0, "DP": {}, "streams": {}})
        tokens = sum(coverage) * block_size
        instance["streams"][str(engine.dp_rank)] = standings.answer("engine", engine.instance_id, engine.dp_rank)
        instance["longest_matched"] = max(instance["longest_matched"], tokens)
        instance["DP"][str(engine.dp_rank)] = {
            "matched_tokens": tokens,
            "npu_blocks": coverage.npu,
            "cpu_blocks": coverage.cpu_local + coverage.cpu_remote,
            "disk_blocks": coverage.disk_local + coverage.disk_remote,
            "cpu_local_blocks": coverage.cpu_local,
            "cpu_remote_blocks": coverage.cpu_remote,
            "disk_local_blocks": coverage.disk_local,
            "disk_remote_blocks": coverage.disk_remote,
        }
    return {tenant: instances}


def mooncake_answer(
    tenant: str,
    engines: Sequence[EngineRecord],
    coverages: Sequence[Coverage],
    block_size: int,
    standings: Standings,
) -> Answer:
    """The same in the Mooncake indexer's words: tokens per rank, and by tier those of the best rank."""
    instances: dict[str, dict[str, Any]] = {}
    for engine, coverage in zip(engines, coverages, strict=True):
        instance = instances.setdefault(
            engine.instance_id, {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}, "streams": {}}
        )
        instance["streams"][str(engine.dp_rank)] = standings.answer("engine", engine.instance_id, engine.dp_rank)
        tokens = sum(coverage) * block_size
        if tokens > instance["longest_matched"]:
            instance["longest_matched"] = tokens
            instance["GPU"] = coverage.npu * block_size
            instance["CPU"] = (coverage.cpu_local + coverage.cpu_remote) * block_size
            instance["DISK"] = (coverage.disk_local + coverage.disk_remote) * block_size
        instance["DP"][str(engine.dp_rank)] = tokens
    return {tenant: instances}
