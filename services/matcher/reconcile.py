"""Two-phase reconciliation, first half (pure): what a canonical batch asks of the waiting state.

`plan` makes the steps of a message per space; `confirmation.finish` turns the store's answers into index events. What
happens to which event is the table in docs/architecture.md.
"""

from dataclasses import dataclass, field

from schemas.blocks import Tier
from schemas.events import (
    Cleared,
    Event,
    EventBatch,
    IndexCleared,
    IndexEvent,
    IndexRemoved,
    IndexStored,
    Location,
    Removed,
    Stored,
    Worker,
)
from services.matcher.state import (
    Forget,
    Operation,
    Prove,
    SpaceKey,
    Teach,
    Undo,
)

POOL_TIERS = (Tier.CPU, Tier.DISK)


@dataclass(frozen=True, slots=True)
class Ask:
    """An operation whose result becomes index events in this place."""

    operation: Operation
    block_size: int = 0


Step = IndexEvent | Ask


@dataclass(slots=True)
class Steps:
    """What one message does in one space, in order. dropped: events without effect, by reason."""

    steps: list[Step] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def operations(self) -> list[Operation]:
        """What has to be asked of the store, in order."""
        return [step.operation for step in self.steps if isinstance(step, Ask)]


def plan(batch: EventBatch, remembers: bool) -> dict[SpaceKey, Steps]:
    """The steps of a message per space. remembers: content of this engine may be needed by a pool."""
    spaces: dict[SpaceKey, Steps] = {}
    for event in batch.events:
        space = (event.model or batch.model, event.tenant or batch.tenant)
        steps = spaces.setdefault(space, Steps())
        if batch.source == "engine":
            _plan_engine(steps, event, batch, remembers)
        else:
            _plan_pool(steps, event, batch)
    return spaces


def _plan_engine(steps: Steps, event: Event, batch: EventBatch, remembers: bool) -> None:
    worker = Worker(batch.instance_id, batch.dp_rank)
    if isinstance(event, Stored):
        if event.tier is Tier.NPU:
            steps.steps.append(_stored(event, worker, batch.counted))
            if remembers and event.content_hashes:
                steps.steps.append(Ask(_teach(event, worker, npu=True), event.block_size))
        elif event.tier in batch.own_tiers:
            if event.content_hashes:
                steps.steps.append(Ask(_teach(event, worker, npu=False), event.block_size))
            steps.steps.append(Ask(Prove(event.engine_hashes, worker, event.tier), event.block_size))
        elif event.content_hashes:
            steps.steps.append(Ask(_teach(event, worker, npu=False), event.block_size))
        else:
            # With a pool behind the engine this proves nothing and teaches nothing.
            steps.dropped["no_content"] = steps.dropped.get("no_content", 0) + 1
    elif isinstance(event, Removed):
        own = event.tier is Tier.NPU or event.tier in batch.own_tiers
        if own:
            steps.steps.append(IndexRemoved(worker, event.tier, event.engine_hashes))
        if event.tier is not Tier.NPU:
            steps.steps.append(Ask(Undo(event.engine_hashes, worker, event.tier, forget_offload=not own)))
    else:
        steps.steps.append(IndexCleared(worker, event.tiers))
        own_tiers = tuple(tier for tier in event.tiers if tier in batch.own_tiers)
        if own_tiers:
            steps.steps.append(Ask(Forget(worker, own_tiers)))


def _plan_pool(steps: Steps, event: Event, batch: EventBatch) -> None:
    location = Location(batch.instance_id, event.backend_id)
    if not event.backend_id:
        # An empty owner names no location: nothing can be said of it (a clear of everything would be a guess).
        steps.dropped["no_location"] = steps.dropped.get("no_location", 0) + 1
    elif isinstance(event, Stored):
        if event.content_hashes:
            teacher = Worker(batch.instance_id, batch.dp_rank)
            steps.steps.append(Ask(_teach(event, teacher, npu=False), event.block_size))
        steps.steps.append(Ask(Prove(event.engine_hashes, location, event.tier), event.block_size))
    elif isinstance(event, Removed):
        steps.steps.append(IndexRemoved(location, event.tier, event.engine_hashes))
        steps.steps.append(Ask(Undo(event.engine_hashes, location, event.tier)))
    elif isinstance(event, Cleared):
        # A pool clears its own tiers only, never an engine's NPU.
        tiers = tuple(tier for tier in event.tiers if tier in POOL_TIERS)
        steps.steps.append(IndexCleared(location, tiers))
        steps.steps.append(Ask(Forget(location, tiers)))


def _stored(event: Stored, worker: Worker, counted: bool) -> IndexStored:
    return IndexStored(
        worker,
        event.tier,
        event.engine_hashes,
        event.parent,
        event.content_hashes,
        event.root,
        event.block_size,
        counted,
    )


def _teach(event: Stored, teacher: Worker, npu: bool) -> Teach:
    return Teach(npu, event.engine_hashes, event.parent, event.content_hashes, event.root, teacher)
