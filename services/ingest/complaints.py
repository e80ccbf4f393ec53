"""What an operator should look at, as notes of /readyz: publishers that are refused in full, and never reached ones."""

from collections.abc import Iterable

from schemas.wire.types import RejectReason
from services.ingest.counts import Counts
from services.ingest.registrations import PublisherKey
from services.ingest.subscriptions import Subscription
from services.runtime.health import Health

SILENT_SECONDS = 10.0
MAX_NOTES = 50
# A hybrid model's publisher sends these all day; they say nothing about a fault.
_EXPECTED = frozenset((RejectReason.NON_MAIN_ATTENTION,))


class Complaints:
    """Keeps the notes of one process. A service stays ready: a publisher's fault must not take the others along.

    A publisher is refused in full when of what came since the last look nothing could be used and something was
    refused, as after an engine's upgrade to an unknown format. The first usable event takes the note away.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._told: dict[str, str] = {}
        self._seen: dict[PublisherKey, tuple[int, int]] = {}
        self._refused: set[PublisherKey] = set()

    def look(self, subscriptions: Iterable[Subscription], now: float) -> None:
        """Bring the notes up to date. now: seconds since the epoch."""
        notes: dict[str, str] = {}
        seen: dict[PublisherKey, tuple[int, int]] = {}
        for subscription in subscriptions:
            key, counts = subscription.publisher.key, subscription.intake.counts
            seen[key] = self._count(key, counts)
            if text := self._text(subscription, now):
                notes[f"publisher {key.instance_id} rank {key.dp_rank} at {key.endpoint}"] = text
        self._seen = seen
        self._refused &= seen.keys()
        self._tell(notes)

    def _count(self, key: PublisherKey, counts: Counts) -> tuple[int, int]:
        refused = _unexpected(counts)
        used = counts.events.published + counts.events.pending
        before = self._seen.get(key, (0, 0))
        if used > before[1]:
            self._refused.discard(key)
        elif refused > before[0]:
            self._refused.add(key)
        return refused, used

    def _text(self, subscription: Subscription, now: float) -> str:
        counts, key = subscription.intake.counts, subscription.publisher.key
        if key in self._refused:
            size = subscription.publisher.record.block_size
            if counts.block_size_seen and RejectReason.BLOCK_SIZE_MISMATCH in counts.events.rejected:
                return f"block_size {counts.block_size_seen} in the events, {size} in the registration"
            refused = counts.events.rejected + counts.messages.rejected
            reasons = ", ".join(f"{reason} {count}" for reason, count in refused.most_common(3))
            return f"nothing of what it sends can be used ({reasons}); see /publishers and the log"
        if not subscription.ever_connected and now - subscription.since > SILENT_SECONDS:
            return subscription.error or f"never connected in {now - subscription.since:.0f} s; is the port right?"
        return ""

    def _tell(self, notes: dict[str, str]) -> None:
        if len(notes) > MAX_NOTES:
            more = len(notes) - MAX_NOTES
            notes = dict(list(notes.items())[:MAX_NOTES]) | {"publishers": f"{more} more have notes, see /publishers"}
        for name in self._told.keys() - notes.keys():
            self._health.note(name, "")
        for name, text in notes.items():
            self._health.note(name, text)
        self._told = notes


def _unexpected(counts: Counts) -> int:
    events = sum(count for reason, count in counts.events.rejected.items() if reason not in _EXPECTED)
    return events + counts.messages.rejected.total()
