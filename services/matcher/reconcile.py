"""Two-phase reconciliation, first half (pure): what a canonical batch asks of the waiting state.

`plan` makes the steps of a message per space; `confirmation.finish` turns the store's answers into index events. What
happens to which event is the table in docs/architecture.md.
"""

from dataclasses import dataclass, field

from schemas.blocks import Tier
from schemas.events import (
    MAX_BLOCKS_PER_EVENT,
    MAX_EVENTS_PER_BATCH,
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
from schemas.registry import MAX_DP_RANK
from services.matcher.state import Forget, Operation, Prove, SpaceKey, Teach, Undo

POOL_TIERS = (Tier.CPU, Tier.DISK)
MALFORMED = "malformed"
_U64 = 1 << 64


@dataclass(frozen=True, slots=True)
class Ask:
    """An operation whose result becomes index events in this place."""

    operation: Operation
    block_size: int = 0


Step = IndexEvent | Ask


@dataclass(slots=True)
class Steps:
    """What one message does in one space, in order. events: of the message, that name this space.

    dropped: those of them without effect, by reason.
    """

    steps: list[Step] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    events: int = 0

    def operations(self) -> tuple[Operation, ...]:
        """What has to be asked of the store, in order."""
        return tuple([step.operation for step in self.steps if isinstance(step, Ask)])

    def drop(self, reason: str) -> None:
        """Count an event that has no effect."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def problem(event: Event) -> str:
    """What is wrong with an event although it could be decoded, empty when nothing is."""
    if "\0" in event.backend_id:
        return "backend_id contains NUL"
    if isinstance(event, Cleared):
        return ""
    hashes = len(event.engine_hashes)
    if not hashes or hashes % 8 or hashes > 8 * MAX_BLOCKS_PER_EVENT:
        return f"engine_hashes has {hashes} bytes; it must hold 1 to {MAX_BLOCKS_PER_EVENT} hashes of 8"
    if isinstance(event, Stored):
        if event.content_hashes and len(event.content_hashes) != hashes:
            return f"content_hashes has {len(event.content_hashes)} bytes, engine_hashes {hashes}: they must agree"
        if event.parent is not None and not 0 <= event.parent < _U64:
            return "parent is no 64-bit hash"
        if not 0 <= event.root < _U64:
            return "root is no 64-bit hash"
    return ""


def batch_problem(batch: EventBatch) -> str:
    """What is wrong with a message as a whole, so that nothing of it can be used; empty when nothing is."""
    if not 0 <= batch.generation < 1 << 53:
        return "generation is no time in milliseconds"
    if not 0 <= batch.dp_rank <= MAX_DP_RANK:
        return f"dp_rank must be 0 to {MAX_DP_RANK}"
    if not batch.instance_id or "\0" in batch.instance_id:
        return "instance_id is empty or contains NUL"
    if len(batch.events) > MAX_EVENTS_PER_BATCH:
        return f"{len(batch.events)} events, at most {MAX_EVENTS_PER_BATCH} belong in one message"
    return ""


def plan(batch: EventBatch) -> dict[SpaceKey, Steps]:
    """The steps of a message per space.

    They depend on the message alone, never on what this process knows: the answers stored for it are put to its steps
    again by the next leader. An event that makes no sense is dropped and counted, the others go on.
    """
    spaces: dict[SpaceKey, Steps] = {}
    for event in batch.events:
        space = (event.model or batch.model, event.tenant or batch.tenant)
        steps = spaces.setdefault(space, Steps())
        steps.events += 1
        if problem(event):
            steps.drop(MALFORMED)
        elif batch.source == "engine":
            _plan_engine(steps, event, batch)
        else:
            _plan_pool(steps, event, batch)
    return spaces


def _plan_engine(steps: Steps, event: Event, batch: EventBatch) -> None:
    worker = Worker(batch.instance_id, batch.dp_rank)
    if isinstance(event, Stored):
        if event.tier is Tier.NPU:
            steps.steps.append(_stored(event, worker, batch.counted))
            if event.content_hashes and batch.own_tiers:
                steps.steps.append(Ask(_teach(event, worker, npu=True, own=True), event.block_size))
            if event.content_hashes and batch.pool_expected:
                steps.steps.append(Ask(_teach(event, worker, npu=True), event.block_size))
        elif event.tier in batch.own_tiers:
            if event.content_hashes:
                steps.steps.append(Ask(_teach(event, worker, npu=False, own=True), event.block_size))
            steps.steps.append(Ask(Prove(event.engine_hashes, worker, event.tier, own=True), event.block_size))
        elif not batch.pool_expected:
            steps.drop("no_pool")
        elif event.content_hashes:
            steps.steps.append(Ask(_teach(event, worker, npu=False), event.block_size))
        else:
            # With a pool behind the engine this proves nothing and teaches nothing.
            steps.drop("no_content")
    elif isinstance(event, Removed):
        own = event.tier in batch.own_tiers
        if own or event.tier is Tier.NPU:
            steps.steps.append(IndexRemoved(worker, event.tier, event.engine_hashes))
        if event.tier is not Tier.NPU:
            undo = Undo(event.engine_hashes, worker, event.tier, forget_offload=not own, own=own)
            steps.steps.append(Ask(undo))
    else:
        steps.steps.append(IndexCleared(worker, event.tiers))
        own_tiers = tuple(tier for tier in event.tiers if tier in batch.own_tiers)
        if own_tiers:
            steps.steps.append(Ask(Forget(worker, own_tiers)))


def _plan_pool(steps: Steps, event: Event, batch: EventBatch) -> None:
    location = Location(batch.instance_id, event.backend_id)
    if not event.backend_id:
        # An empty owner names no location: nothing can be said of it (a clear of everything would be a guess).
        steps.drop("no_location")
    elif not isinstance(event, Cleared) and event.tier is Tier.NPU:
        # NPU memory that a pool owns is no tier of the index, and never an engine's.
        steps.drop("npu_of_pool")
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


def _teach(event: Stored, teacher: Worker, npu: bool, own: bool = False) -> Teach:
    return Teach(npu, event.engine_hashes, event.parent, event.content_hashes, event.root, teacher, own)
