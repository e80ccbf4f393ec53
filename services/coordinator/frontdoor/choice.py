"""Where a request may go and where it goes (pure)."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from schemas.registry import EngineRecord
from services.coordinator.frontdoor.load import LoadAccount, Worker
from services.runtime.registry_store import Registry

NO_TARGETS = ("decode", "encode")


@dataclass(frozen=True, slots=True)
class Target:
    """A worker with a URL. rank_header: whether the URL serves several ranks, so that the rank must be named."""

    worker: Worker
    record: EngineRecord
    url: str
    rank_header: bool


def targets_for(registry: Registry, model: str, tenant: str) -> list[Target]:
    """Every worker that serves the model (or the LoRA adapter of that name) for the tenant and takes requests."""
    fit = [
        record
        for record in registry.engines.values()
        if record.url is not None
        and not record.paused
        and record.role not in NO_TARGETS
        and record.tenant == tenant
        and (record.lora_name or record.model) == model
    ]
    return [
        Target(
            Worker(record.instance_id, record.dp_rank),
            record,
            record.url,
            any(
                other.instance_id == record.instance_id and other.dp_rank != record.dp_rank and other.url == record.url
                for other in fit
            ),
        )
        for record in fit
        if record.url is not None
    ]


def choose(
    targets: Sequence[Target],
    matched_tokens: Mapping[Worker, int],
    load: LoadAccount,
    tokens_per_request: int,
    excluded: Collection[Worker] = (),
) -> Target | None:
    """The worker with the most matched tokens, less what its running requests outweigh; ties at random.

    None when every target is excluded.
    """
    left = [target for target in targets if target.worker not in excluded]
    if not left:
        return None

    def score(target: Target) -> tuple[int, int]:
        running = load.running(target.worker)
        return matched_tokens.get(target.worker, 0) - tokens_per_request * running, -running

    best = max(map(score, left))
    return random.choice([target for target in left if score(target) == best])


def served_models(registry: Registry) -> list[str]:
    """Names that requests may use, in order."""
    return sorted(
        {
            record.lora_name or record.model
            for record in registry.engines.values()
            if record.url is not None and record.role not in NO_TARGETS
        }
    )
