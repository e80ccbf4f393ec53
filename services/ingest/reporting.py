"""Logs and taps of ingest: what was received, parsed and dropped, without tokens.

One log line and one tap note per message and state. Complaints about what publishers send are repeated at a limited
rate, by publisher and reason; the counts are complete.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from schemas.blocks import unpack_hashes
from schemas.events import Cleared, Event, Removed, StateNote, Stored
from schemas.wire.types import Rejected
from services.ingest.arrivals import Arrival
from services.ingest.intake import Intake
from services.ingest.outcomes import Outcome
from services.ingest.registrations import Publisher
from services.ingest.subscriptions import Subscription
from services.ingest.zmq_sockets import Link
from services.runtime.logging import RateLimited, get_logger, kv_event_wanted, log_kv_event
from services.runtime.taps import SKIPPED

PREVIEW_HASHES = 4
SERVICE = "ingest"


class Tap(Protocol):
    """Where state notes go (services.runtime.taps.StateTap)."""

    def note(self, note: StateNote) -> None:
        """Publish one note, fire and forget."""
        ...


class Reporter:
    """Tells logs and taps about messages and connections. notes_per_second: above it no note is even built."""

    def __init__(self, tap: Tap, notes_per_second: int, limiter: RateLimited | None = None) -> None:
        self._tap = tap
        self._notes_per_second = notes_per_second
        self._notes_left = notes_per_second
        self._second = 0
        self._skipped = SKIPPED.labels(SERVICE)
        self._limiter = limiter or RateLimited()
        self._log = get_logger(SERVICE)

    def message(self, intake: Intake, outcome: Outcome) -> None:
        """What became of one message. A replay's copies of what was taken are not news."""
        if outcome.arrival is Arrival.REPLAYED:
            return
        if kv_event_wanted("received"):
            self._log_states(intake, outcome)
        if self._may_note():
            for note in self._notes(intake, outcome):
                self._tap.note(note)
        publisher = intake.publisher
        if outcome.rejected or outcome.dropped:
            self._complain(publisher, outcome)
        if outcome.arrival is Arrival.GAP:
            stream = intake.stream
            self._warn(
                publisher, "sequence_gap", seq=outcome.seq, missed=stream.missed, before_join=stream.missed_before_join
            )
        elif outcome.arrival is Arrival.RESTART:
            self._log.info(
                "publisher_restarted", **_names(publisher), seq=outcome.seq, generation=intake.stream.generation
            )
        elif outcome.arrival is Arrival.COUNTER_RESET:
            self._warn(publisher, "publisher_numbers_began_anew", seq=outcome.seq)

    def link(self, subscription: Subscription, link: Link) -> None:
        """The connection to a publisher changed."""
        names = _names(subscription.publisher)
        if link is Link.CONNECTED:
            self._log.info("publisher_connected", **names)
        elif link is Link.DISCONNECTED:
            self._log.warning("publisher_disconnected", **names)
        elif link is Link.REFUSED:
            self._warn(subscription.publisher, "publisher_handshake_failed")
        elif not subscription.ever_connected:
            self._warn(subscription.publisher, "publisher_never_connected", attempts=subscription.attempts)

    def failure(self, publisher: Publisher, error: Exception) -> None:
        """A message could not be handled through a fault of ours."""
        held_back = self._limiter.allow(("failure", publisher.key))
        if held_back is not None:
            self._log.error(
                "message_failed", **_names(publisher), error=type(error).__name__, held_back=held_back, exc_info=error
            )

    def cannot_subscribe(self, subscription: Subscription) -> None:
        """A publisher has no socket."""
        self._warn(subscription.publisher, "cannot_subscribe", error=subscription.error)

    def _complain(self, publisher: Publisher, outcome: Outcome) -> None:
        for refusal in outcome.rejected:
            self._warn(publisher, "refused", key=refusal.reason, reason=refusal.reason, detail=refusal.detail)
        if outcome.dropped in (Arrival.BUFFER_FULL, Arrival.WAITING_FULL):
            self._warn(publisher, outcome.dropped, seq=outcome.seq)

    def _warn(self, publisher: Publisher, event: str, *, key: str = "", **fields: object) -> None:
        held_back = self._limiter.allow((event, key, publisher.key))
        if held_back is not None:
            self._log.warning(event, **_names(publisher), **fields, held_back=held_back)

    def _log_states(self, intake: Intake, outcome: Outcome) -> None:
        for note in self._notes(intake, outcome):
            log_kv_event(
                self._log,
                note.state,
                **_names(intake.publisher),
                seq=note.seq,
                event_type=note.event_type,
                medium=note.medium,
                event_backend_id=note.backend_id,
                num_blocks=note.blocks,
                reason=note.reason,
                preview=note.preview,
            )

    def _may_note(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._notes_left = second, self._notes_per_second
        if self._notes_left <= 0:
            self._skipped.inc(2)
            return False
        self._notes_left -= 2
        return True

    def _notes(self, intake: Intake, outcome: Outcome) -> list[StateNote]:
        record = intake.publisher.record
        source, now = intake.publisher.key.source, intake.last_received_at

        def note(state: str, **fields: object) -> StateNote:
            return StateNote(
                state,
                record.model,
                record.tenant,
                now,
                SERVICE,
                source,
                record.instance_id,
                record.dp_rank,
                seq=outcome.seq,
                **fields,  # type: ignore[arg-type]
            )

        notes = [note("received")]
        if outcome.events:
            events = outcome.events
            notes.append(
                note(
                    "parsed",
                    event_type=_common(map(event_type, events)),
                    medium=_common(map(_medium, events)),
                    backend_id=_common(event.backend_id for event in events),
                    blocks=outcome.blocks,
                    preview=_preview(events),
                )
            )
        for reason, count in _dropped(outcome.rejected, outcome.dropped).items():
            notes.append(note("dropped", reason=reason, event_type=f"{count} events" if count > 1 else ""))
        return notes


def event_type(event: Event) -> str:
    """The word of logs for an event."""
    return {Stored: "stored", Removed: "removed", Cleared: "cleared"}[type(event)]


def _medium(event: Event) -> str:
    return "+".join(event.tiers) if isinstance(event, Cleared) else event.tier


def _common(words: Iterable[str]) -> str:
    distinct = dict.fromkeys(words)
    return next(iter(distinct)) if len(distinct) == 1 else "mixed"


def _preview(events: Sequence[Event]) -> tuple[str, ...]:
    for event in events:
        if not isinstance(event, Cleared):
            return tuple(f"{value:016x}" for value in unpack_hashes(event.engine_hashes[: 8 * PREVIEW_HASHES]))
    return ()


def _dropped(rejected: Sequence[Rejected], dropped: str) -> dict[str, int]:
    reasons: dict[str, int] = {dropped: 1} if dropped else {}
    for refusal in rejected:
        reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
    return reasons


def _names(publisher: Publisher) -> dict[str, object]:
    record = publisher.record
    return {
        "source": publisher.key.source,
        "instance_id": record.instance_id,
        "dp_rank": record.dp_rank,
        "model": record.model,
        "endpoint": publisher.key.endpoint,
    }
