"""Two-phase reconciliation, second half (pure): the store's answers become index events, and notes of what happened."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.blocks import Tier, pack_hashes, unpack_hashes
from schemas.events import (
    EventBatch,
    Holder,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexRemoved,
    IndexStored,
    Location,
)
from services.matcher.reconcile import Ask, Steps
from services.matcher.state import Content, Prove, Proved, Result, Taught, Teach, Waiting


@dataclass(frozen=True, slots=True)
class Note:
    """One step of the state machine, for logs and taps."""

    state: str
    event_type: str
    tier: str
    blocks: int
    backend_id: str = ""
    reason: str = ""
    preview: tuple[str, ...] = ()


def finish(
    batch: EventBatch, source_sequence: int, steps: Steps, results: Sequence[Result]
) -> tuple[IndexGroup, list[Note]]:
    """The index events of a message in one space, and what to say about them. results: one per operation, in order."""
    answers = iter(results)
    events: list[IndexEvent] = []
    notes = [Note("dropped", "", "", number, reason=reason) for reason, number in steps.dropped.items()]
    for step in steps.steps:
        if isinstance(step, Ask):
            made, said = _after(step, next(answers))
            events.extend(made)
            notes.extend(said)
        else:
            events.append(step)
            notes.append(_applied(step))
    group = IndexGroup(
        source_sequence=source_sequence,
        source=batch.source,
        instance_id=batch.instance_id,
        dp_rank=batch.dp_rank,
        generation=batch.generation,
        first_seq=batch.first_seq,
        last_seq=batch.last_seq,
        received_at=batch.received_at,
        events=events,
    )
    return group, notes


def _after(step: Ask, result: Result) -> tuple[list[IndexEvent], list[Note]]:
    operation = step.operation
    if isinstance(operation, Teach) and isinstance(result, Taught):
        return _after_teach(operation, result, step.block_size)
    if isinstance(operation, Prove) and isinstance(result, Proved):
        return _after_prove(operation, result, step.block_size)
    return [], []


def _after_teach(operation: Teach, result: Taught, block_size: int) -> tuple[list[IndexEvent], list[Note]]:
    events: list[IndexEvent] = []
    notes: list[Note] = []
    hashes = unpack_hashes(operation.hashes)
    for number, waiting in result.corrected:
        events.extend(IndexRemoved(one.holder, one.tier, pack_hashes([hashes[number]])) for one in waiting)
    completed = _by_holder([*result.corrected, *result.matched])
    for waiting_one, numbers in completed.items():
        confirmed = [(hashes[n], _content_of(operation, hashes[n - 1] if n else None, n)) for n in sorted(numbers)]
        events.extend(_chains(waiting_one.holder, waiting_one.tier, confirmed, block_size))
        notes.append(_note("matched", waiting_one, [name for name, _ in confirmed]))
    if not operation.npu and not completed:
        notes.append(Note("offload_cached", "stored", "", len(hashes), preview=_preview(hashes)))
    return events, notes


def _content_of(operation: Teach, previous: int | None, number: int) -> Content:
    parent = operation.parent if number == 0 else previous
    content_hash = int.from_bytes(operation.contents[8 * number : 8 * number + 8], "little")
    return Content(parent, content_hash, 0 if parent is not None else operation.root, operation.teacher)


def _after_prove(operation: Prove, result: Proved, block_size: int) -> tuple[list[IndexEvent], list[Note]]:
    hashes = unpack_hashes(operation.hashes)
    known = [(name, content) for name, content in zip(hashes, result.contents, strict=True) if content is not None]
    unknown = [name for name, content in zip(hashes, result.contents, strict=True) if content is None]
    one = Waiting(operation.holder, operation.tier)
    events: list[IndexEvent] = list(_chains(operation.holder, operation.tier, known, block_size))
    notes: list[Note] = []
    if known:
        state = "confirmed" if isinstance(operation.holder, Location) else "applied"
        notes.append(_note(state, one, [name for name, _ in known]))
    if unknown:
        # The router may still know these blocks by name (held elsewhere in the pool): it takes them or ignores them.
        events.append(IndexStored(operation.holder, operation.tier, pack_hashes(unknown)))
        notes.append(_note("queued", one, unknown))
    return events, notes


def _chains(holder: Holder, tier: Tier, blocks: Sequence[tuple[int, Content]], block_size: int) -> list[IndexStored]:
    """Confirmed blocks as few stored events as their parents allow."""
    made: list[IndexStored] = []
    names: list[int] = []
    contents: list[Content] = []

    def close() -> None:
        if names:
            first = contents[0]
            made.append(
                IndexStored(
                    holder=holder,
                    tier=tier,
                    engine_hashes=pack_hashes(names),
                    parent=first.parent,
                    content_hashes=pack_hashes(content.content_hash for content in contents),
                    root=first.root,
                    block_size=block_size,
                    teacher=first.teacher if first.teacher != holder else None,
                )
            )

    for name, content in blocks:
        if names and (content.parent != names[-1] or content.teacher != contents[0].teacher):
            close()
            names, contents = [], []
        names.append(name)
        contents.append(content)
    close()
    return made


def _by_holder(blocks: Sequence[tuple[int, tuple[Waiting, ...]]]) -> dict[Waiting, set[int]]:
    holders: dict[Waiting, set[int]] = {}
    for number, waiting in blocks:
        for one in waiting:
            holders.setdefault(one, set()).add(number)
    return holders


def _preview(hashes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{name:016x}" for name in hashes[:4])


def _note(state: str, one: Waiting, hashes: Sequence[int]) -> Note:
    backend_id = one.holder.backend_id if isinstance(one.holder, Location) else ""
    return Note(state, "stored", str(one.tier), len(hashes), backend_id, preview=_preview(hashes))


def _applied(event: IndexEvent) -> Note:
    backend_id = event.holder.backend_id if isinstance(event.holder, Location) else ""
    if isinstance(event, IndexCleared):
        return Note("applied", "cleared", ",".join(event.tiers), 0, backend_id)
    kind = "stored" if isinstance(event, IndexStored) else "removed"
    first = unpack_hashes(event.engine_hashes[:32])
    return Note("applied", kind, str(event.tier), len(event.engine_hashes) // 8, backend_id, preview=_preview(first))
