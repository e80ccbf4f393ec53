"""From coverages to the answers of /query, in the shapes that existing callers read (docs/compatibility.md)."""

from collections.abc import Sequence
from typing import Any

from schemas.registry import EngineRecord
from services.router.index.port import Coverage


def matched_blocks(coverage: Coverage) -> int:
    """All blocks of a query that a worker can use."""
    return sum(coverage)


def _rank(coverage: Coverage, block_size: int) -> dict[str, int]:
    npu, cpu_local, cpu_remote, disk_local, disk_remote = coverage
    return {
        "matched_tokens": sum(coverage) * block_size,
        "npu_blocks": npu,
        "cpu_blocks": cpu_local + cpu_remote,
        "disk_blocks": disk_local + disk_remote,
        "cpu_local_blocks": cpu_local,
        "cpu_remote_blocks": cpu_remote,
        "disk_local_blocks": disk_local,
        "disk_remote_blocks": disk_remote,
    }


def query_answer(
    tenant: str, engines: Sequence[EngineRecord], coverages: Sequence[Coverage], block_size: int, mooncake: bool = False
) -> dict[str, dict[str, dict[str, Any]]]:
    """The body of /query: per tenant and instance, every registered instance, those without a hit with zeros.

    mooncake: ``DP`` maps ranks to tokens, as the Mooncake indexer answers; else to an object of counts. Instances carry
    ``GPU`` / ``CPU`` / ``DISK`` tokens of their best rank in both.
    """
    instances: dict[str, dict[str, Any]] = {}
    for engine, coverage in zip(engines, coverages, strict=True):
        tokens = sum(coverage) * block_size
        instance = instances.get(engine.instance_id)
        if instance is None:
            instance = instances[engine.instance_id] = {"longest_matched": -1, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}}
        if tokens > instance["longest_matched"]:
            instance["longest_matched"] = tokens
            instance["GPU"] = coverage.npu * block_size
            instance["CPU"] = (coverage.cpu_local + coverage.cpu_remote) * block_size
            instance["DISK"] = (coverage.disk_local + coverage.disk_remote) * block_size
        instance["DP"][str(engine.dp_rank)] = tokens if mooncake else _rank(coverage, block_size)
    return {tenant: instances}
