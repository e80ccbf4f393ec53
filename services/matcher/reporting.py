"""What the matcher says of its work: metrics, kv_event lines and taps, one note per message, state and medium."""

import time
from collections.abc import Sequence

from schemas.events import EventBatch, StateNote
from services.matcher import metrics
from services.matcher.confirmation import Note
from services.matcher.state import Expired, SpaceKey
from services.runtime.logging import get_logger, kv_event_wanted, log_kv_event
from services.runtime.taps import StateTap

SERVICE = "matcher"

log = get_logger("matcher")


class Reporter:
    """Sends every note to metrics, log and taps."""

    def __init__(self, tap: StateTap | None) -> None:
        self._tap = tap

    def report(self, batch: EventBatch, space: SpaceKey, notes: Sequence[Note]) -> None:
        """What a message did in a space."""
        together: dict[tuple[str, str, str, str, str], list[Note]] = {}
        for note in notes:
            key = (note.state, note.event_type, note.tier, note.backend_id, note.reason)
            together.setdefault(key, []).append(note)
        for (state, event_type, tier, backend_id, reason), same in together.items():
            self._say(
                StateNote(
                    state=state,
                    model=space[0],
                    tenant=space[1],
                    at=time.time(),
                    service=SERVICE,
                    source=batch.source,
                    instance_id=batch.instance_id,
                    dp_rank=batch.dp_rank,
                    event_type=event_type,
                    medium=tier,
                    backend_id=backend_id,
                    blocks=sum(note.blocks for note in same),
                    seq=batch.last_seq,
                    reason=reason,
                    preview=same[0].preview,
                )
            )

    def dropped(self, batch: EventBatch, reason: str, events: int) -> None:
        """Events of a message without effect."""
        note = Note("dropped", "", "", events, reason=reason)
        self.report(batch, (batch.model, batch.tenant), [note])

    def expired(self, space: SpaceKey, expired: Sequence[Expired], remaining: int, ttl: float) -> None:
        """Waiting entries whose time was over."""
        media = ",".join(sorted({one.waiting.tier for one in expired}))
        preview = tuple(f"{one.engine_hash:016x}" for one in expired[:4])
        metrics.STATES.labels("pending_expired", media).inc(len(expired))
        log_kv_event(
            log,
            "pending_expired",
            model=space[0],
            tenant=space[1],
            medium=media,
            expired=len(expired),
            pending_ttl=ttl,
            remaining=remaining,
            preview=preview,
        )
        if self._tap is not None:
            self._tap.note(
                StateNote(
                    state="pending_expired",
                    model=space[0],
                    tenant=space[1],
                    at=time.time(),
                    service=SERVICE,
                    medium=media,
                    blocks=len(expired),
                    preview=preview,
                )
            )

    def _say(self, note: StateNote) -> None:
        if note.state == "dropped":
            metrics.DROPPED.labels(note.reason).inc(note.blocks)
        else:
            metrics.STATES.labels(note.state, note.medium).inc(note.blocks)
        if kv_event_wanted(note.state):
            log_kv_event(
                log,
                note.state,
                model=note.model,
                tenant=note.tenant,
                source=note.source,
                instance_id=note.instance_id,
                dp_rank=note.dp_rank,
                event_type=note.event_type,
                medium=note.medium,
                backend_id=note.backend_id,
                num_blocks=note.blocks,
                seq=note.seq,
                reason=note.reason,
                preview=note.preview,
            )
        if self._tap is not None:
            self._tap.note(note)
