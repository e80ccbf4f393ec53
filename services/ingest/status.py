"""What ingest tells about its publishers: ``GET /publishers`` and the metrics, read when asked for."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from schemas.streams import StreamState
from services.ingest.counts import Tally
from services.ingest.subscriptions import Subscription

_LABELS = ("source", "instance_id", "dp_rank", "tiers")


def publisher_status(subscription: Subscription, now: float) -> dict[str, Any]:
    """Everything known about one publisher. now: seconds since the epoch."""
    intake, publisher = subscription.intake, subscription.publisher
    stream, counts, record = intake.stream, intake.counts, publisher.record
    return {
        "source": publisher.key.source,
        "instance_id": record.instance_id,
        "dp_rank": record.dp_rank,
        "model": record.model,
        "tenant": record.tenant,
        "endpoint": publisher.key.endpoint,
        "tiers": list(publisher.tiers),
        "connected": stream.connected,
        "ever_connected": subscription.ever_connected,
        "connection_attempts": subscription.attempts,
        "handshakes_refused": subscription.refused,
        "error": subscription.error or None,
        "state": stream.state,
        "reason": stream.reason,
        "coverage": round(stream.coverage, 6),
        "generation": stream.generation,
        "first_seq": stream.first_seq,
        "last_seq": stream.last_seq,
        "gaps": stream.gaps,
        "missed": stream.missed,
        "missed_before_join": stream.missed_before_join,
        "restarts": stream.restarts,
        "counter_resets": stream.counter_resets,
        "repaired": stream.repaired,
        "waiting_messages": len(stream.held),
        "unaccounted_messages": intake.unaccounted,
        "replay_endpoint": publisher.replay_endpoint,
        "other_ranks": {str(rank): count for rank, count in sorted(intake.ranks.others.items())},
        "overtaken": intake.times_overtaken,
        "age_seconds": round(now - intake.last_received_at, 3) if intake.last_received_at else None,
        "subscribed_seconds": round(now - subscription.since, 3),
        "messages": _tally(counts.messages),
        "events": _tally(counts.events),
        "blocks_published": counts.blocks,
        "rank_conflicts": counts.rank_conflicts,
        "block_size": {"registered": record.block_size, "disagreeing": counts.block_size_seen or None},
        "buffered_bytes": intake.buffer.bytes,
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "received": tally.received,
        "published": tally.published,
        "pending": tally.pending,
        "rejected": _by_reason(tally.rejected),
        "dropped": _by_reason(tally.dropped),
    }


def _by_reason(counts: Counter[str]) -> dict[str, int]:
    # Reasons are enumeration members, which JSON writers do not take as keys.
    return {str(reason): count for reason, count in counts.items()}


class PublisherMetrics:
    """A collector over the live subscriptions: a publisher that is gone takes its series along."""

    def __init__(self, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        self._subscriptions = subscriptions

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: the families depend on no state but are read with it."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One sample per publisher and family."""
        subscriptions = list(self._subscriptions())
        yield from self._tallies(subscriptions, "messages", lambda item: item.intake.counts.messages)
        yield from self._tallies(subscriptions, "events", lambda item: item.intake.counts.events)
        yield from self._values(subscriptions)
        state = GaugeMetricFamily(
            "kvroute_ingest_stream_state", "1 for the state a publisher's stream is in", labels=(*_LABELS, "state")
        )
        for item in subscriptions:
            for word in StreamState:
                state.add_metric((*_labels(item), word), float(item.intake.stream.state is word))
        yield state

    def _tallies(
        self, subscriptions: list[Subscription], what: str, tally_of: Callable[[Subscription], Tally]
    ) -> Iterator[Metric]:
        prefix = f"kvroute_ingest_{what}"
        received = CounterMetricFamily(f"{prefix}_received", f"{what} received", labels=_LABELS)
        published = CounterMetricFamily(f"{prefix}_published", f"{what} stored in the stream", labels=_LABELS)
        rejected = CounterMetricFamily(f"{prefix}_rejected", f"{what} refused", labels=(*_LABELS, "reason"))
        dropped = CounterMetricFamily(f"{prefix}_dropped", f"{what} dropped", labels=(*_LABELS, "reason"))
        pending = GaugeMetricFamily(f"{prefix}_pending", f"{what} not decided yet", labels=_LABELS)
        for item in subscriptions:
            labels, tally = _labels(item), tally_of(item)
            received.add_metric(labels, tally.received)
            published.add_metric(labels, tally.published)
            pending.add_metric(labels, tally.pending)
            for reason, count in tally.rejected.items():
                rejected.add_metric((*labels, reason), count)
            for reason, count in tally.dropped.items():
                dropped.add_metric((*labels, reason), count)
        yield from (received, published, rejected, dropped, pending)

    def _values(self, subscriptions: list[Subscription]) -> Iterator[Metric]:
        now = time.time()
        counters: dict[str, tuple[str, Callable[[Subscription], float]]] = {
            "blocks_published": ("blocks stored in the stream", lambda item: item.intake.counts.blocks),
            "gaps": ("holes in a publisher's numbers", lambda item: item.intake.stream.gaps),
            "missed_messages": ("numbers never seen", lambda item: item.intake.stream.missed_total),
            "restarts": ("new lives of a publisher", lambda item: item.intake.stream.restarts),
            "counter_resets": ("numbers that began anew alone", lambda item: item.intake.stream.counter_resets),
            "repaired_messages": ("messages that a replay brought", lambda item: item.intake.stream.repaired),
            "overtaken": ("times another ingest had stored a batch first", lambda item: item.intake.times_overtaken),
            "rank_conflicts": ("batches of another dp_rank", lambda item: item.intake.counts.rank_conflicts),
            "handshakes_refused": ("connections that failed after TCP", lambda item: item.refused),
        }
        gauges: dict[str, tuple[str, Callable[[Subscription], float]]] = {
            "stream_coverage": (
                "part of this generation's messages that went on",
                lambda item: item.intake.stream.coverage,
            ),
            "subscriber_up": ("1 while connected", lambda item: item.intake.stream.connected),
            "generation": ("generation, ms since the epoch", lambda item: item.intake.stream.generation),
            "last_sequence": ("newest number seen, -1 none", lambda item: _or(item.intake.stream.last_seq, -1)),
            "unaccounted_messages": (
                "received, and nobody knows what became of them",
                lambda item: item.intake.unaccounted,
            ),
            "waiting_messages": ("waiting for a replay", lambda item: len(item.intake.stream.held)),
            "buffered_bytes": ("waiting for NATS", lambda item: item.intake.buffer.bytes),
            "last_message_age_seconds": (
                "since the last message, or since the subscription began",
                lambda item: now - (item.intake.last_received_at or item.since),
            ),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"kvroute_ingest_{name}", text, labels=_LABELS)
            for item in subscriptions:
                counter.add_metric(_labels(item), value(item))
            yield counter
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"kvroute_ingest_{name}", text, labels=_LABELS)
            for item in subscriptions:
                gauge.add_metric(_labels(item), value(item))
            yield gauge


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _labels(subscription: Subscription) -> tuple[str, ...]:
    key = subscription.publisher.key
    return (key.source, key.instance_id, str(key.dp_rank), "+".join(subscription.publisher.tiers))
