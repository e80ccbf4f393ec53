"""What became of every event that reached a hop: received = applied + rejected + dropped + returned, per publisher.

``returned``: given back to the stream unfinished, to be received again. What is none of these is in hand; between two
messages nothing may be. ``Accounts.check`` looks at that again and again: what is missing then was lost in this hop.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

PublisherKey = tuple[str, str, int]

MAX_REASONS = 64
CHECK_SECONDS = 1.0
OTHERS: PublisherKey = ("other", "", 0)
_OVERFLOW = "other_reason"


@dataclass(slots=True)
class Account:
    """The events of one publisher. rejected: could not be used; dropped: had no effect, on purpose; by reason."""

    received: int = 0
    applied: int = 0
    returned: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def in_hand(self) -> int:
        """Received, with nothing decided yet."""
        return self.received - self.applied - self.returned - self.rejected.total() - self.dropped.total()

    def reject(self, reason: str, events: int = 1) -> None:
        """Events that could not be used."""
        _count(self.rejected, reason, events)

    def drop(self, reason: str, events: int = 1) -> None:
        """Events without effect."""
        _count(self.dropped, reason, events)

    def add(self, other: "Account") -> None:
        """Take over what another account has counted."""
        self.received += other.received
        self.applied += other.applied
        self.returned += other.returned
        self.rejected += other.rejected
        self.dropped += other.dropped


class Accounts:
    """The accounts of one hop. Publishers that the registry does not name share one (OTHERS).

    is_registered: whether a publisher may have an account, and metric labels, of its own.
    """

    def __init__(self, is_registered: Callable[[PublisherKey], bool]) -> None:
        self._is_registered = is_registered
        self._accounts: dict[PublisherKey, Account] = {}
        self._checked = 0.0
        self.lost = 0

    def of(self, key: PublisherKey) -> Account:
        """The account of a publisher's events."""
        found = self._accounts.get(key)
        if found is None:
            key = key if self._is_registered(key) else OTHERS
            found = self._accounts.setdefault(key, Account())
        return found

    def give_up(self, reason: str) -> None:
        """Whatever is in hand could not be used."""
        for account in self._accounts.values():
            if account.in_hand > 0:
                account.reject(reason, account.in_hand)

    def check(self) -> dict[PublisherKey, int]:
        """Called when nothing is in hand: what is missing (or was counted twice, negative) by publisher.

        Adds to `lost`, and starts these accounts afresh from here, so that one loss is told once. What publishers that
        left have counted goes to the account of the others.
        """
        missing = {key: account.in_hand for key, account in self._accounts.items() if account.in_hand}
        for key, events in missing.items():
            self.lost += abs(events)
            self._accounts[key].received -= events
        for key in [key for key in self._accounts if key != OTHERS and not self._is_registered(key)]:
            self._accounts.setdefault(OTHERS, Account()).add(self._accounts.pop(key))
        return missing

    def check_now_and_then(self) -> dict[PublisherKey, int]:
        """The same, but at most once every CHECK_SECONDS; called whenever nothing is in hand."""
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return {}
        self._checked = now
        return self.check()

    def items(self) -> Iterator[tuple[PublisherKey, Account]]:
        """The accounts of registered publishers, and that of the others."""
        yield from [item for item in self._accounts.items() if item[0] == OTHERS or self._is_registered(item[0])]


class AccountMetrics:
    """Shows the accounts of a hop. A publisher that left takes its series along."""

    def __init__(self, hop: str, accounts: Accounts) -> None:
        self._hop = hop
        self._accounts = accounts

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Events by publisher and outcome, what is in hand, and what was lost."""
        labels = ("source", "instance_id", "dp_rank")
        name = f"kvroute_{self._hop}_publisher_events"
        events = CounterMetricFamily(
            name, "Events of a publisher by what became of them; they add up", labels=(*labels, "outcome", "reason")
        )
        in_hand = GaugeMetricFamily(f"{name}_in_hand", "Events received and not decided yet", labels=labels)
        for (source, instance_id, rank), account in self._accounts.items():
            own = (source, instance_id, str(rank))
            for outcome in ("received", "applied", "returned"):
                events.add_metric((*own, outcome, ""), getattr(account, outcome))
            for outcome, reasons in (("rejected", account.rejected), ("dropped", account.dropped)):
                for reason, count in reasons.items():
                    events.add_metric((*own, outcome, reason), count)
            in_hand.add_metric(own, account.in_hand)
        yield from (events, in_hand)
        yield CounterMetricFamily(
            f"kvroute_{self._hop}_lost_events", "Events received of which nothing is known", value=self._accounts.lost
        )


def _count(counter: Counter[str], reason: str, events: int) -> None:
    counter[reason if reason in counter or len(counter) < MAX_REASONS else _OVERFLOW] += events
