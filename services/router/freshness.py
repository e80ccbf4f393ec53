"""Keeps the standings current: follows kv_streams and kv_liveness, looks at the clock, and says it in metrics."""

import asyncio
import time
from collections.abc import Iterator

from nats.aio.client import Client
from nats.js import JetStreamContext
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from schemas.streams import StreamRecord, StreamState, load_stream_record
from schemas.subjects import STREAMS_BUCKET, stream_key
from services.router import metrics
from services.router.consumer import IndexConsumer
from services.router.publishers import PublisherKey
from services.router.spaces import Spaces
from services.router.standing import Following, Heard
from services.runtime.health import Health
from services.runtime.kv_watch import KvWatch
from services.runtime.liveness_view import LivenessView
from services.runtime.logging import RateLimited, get_logger
from services.runtime.tasks import end_tasks

LOOK_SECONDS = 0.25
NOTE = "history"

log = get_logger("freshness")


class Freshness:
    """Makes the standings anew a few times a second."""

    def __init__(
        self, nc: Client, js: JetStreamContext, spaces: Spaces, consumer: IndexConsumer, health: Health
    ) -> None:
        self._nc = nc
        self._spaces = spaces
        self._consumer = consumer
        self._health = health
        self._warnings = RateLimited()
        self._streams: KvWatch[StreamRecord] = KvWatch(
            js, STREAMS_BUCKET, lambda key, body: load_stream_record(body), lambda records: None, self._refused
        )
        self._liveness = LivenessView(js)
        self._heard: dict[PublisherKey, float] = {}
        self._connected_since = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._streams.begin()
        self._liveness.start()
        self._task = asyncio.create_task(self._run(), name="freshness")

    async def stop(self) -> None:
        """Stop looking. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        await self._streams.stop()
        await self._liveness.stop()

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                log.exception("standings_not_updated")
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Make all standings anew."""
        moment = time.monotonic()
        if not self._nc.is_connected:
            self._connected_since = moment
        spaces = self._spaces
        registered = {("engine", *key) for key in spaces.registry.engines}
        registered |= {("pool", pool.instance_id, pool.dp_rank) for pool in spaces.registry.pools.values()}
        self._heard = {key: self._heard_at(key, moment) for key in registered}
        changed = spaces.standings.update(
            spaces.registry,
            spaces.publishers,
            lambda key: self._heard_of(key, moment),
            self._liveness.of,
            self._following(),
            spaces.incomplete_before,
            time.time(),
        )
        if changed:
            spaces.standings_changed()
            hidden = [
                f"{key[1]}/{key[2]}: {standing.reason}"
                for key, standing in spaces.standings.all().items()
                if not standing.offered
            ]
            log.info("offered_blocks_changed", not_offered=hidden[:20], count=len(hidden))
        self._look_at_history()

    def _following(self) -> Following:
        if not self._nc.is_connected:
            return Following.DISCONNECTED
        return Following.CURRENT if self._consumer.caught_up else Following.CATCHING_UP

    def _heard_at(self, key: PublisherKey, moment: float) -> float:
        """When ingest last said something of a publisher; a record that has gone was last heard when it was seen."""
        name = stream_key(*key)
        if name in self._streams.records:
            return moment - self._streams.age(name)
        return self._heard.get(key, moment)

    def _heard_of(self, key: PublisherKey, moment: float) -> Heard:
        since = max(self._heard[key], self._connected_since)
        return Heard(self._streams.records.get(stream_key(*key)), moment - since)

    def _look_at_history(self) -> None:
        """A hole in the stream's history is over when every publisher has begun a new life behind it."""
        before = self._spaces.incomplete_before
        old = [standing for standing in self._spaces.standings.all().values() if standing.generation < before]
        metrics.HISTORY_INCOMPLETE.set(int(bool(before and old)))
        if not before or not old:
            self._health.note(NOTE, "")
        elif NOTE not in self._health.notes:
            self._health.note(NOTE, f"blocks of {len(old)} publishers may be missing, the snapshot says")

    def _refused(self, key: str, problem: str) -> None:
        if self._warnings.allow("record") is not None:
            log.warning("stream_record_refused", key=key, problem=problem)


class StandingMetrics:
    """A collector over the standings of registered publishers; who is gone takes its series along."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One sample per publisher and family."""
        labels = ("source", "instance_id", "dp_rank")
        state = GaugeMetricFamily(
            "kvroute_router_stream_state", "1 for the state a publisher's stream is in", labels=(*labels, "state")
        )
        names = {
            "generation": "generation, milliseconds since the epoch",
            "last_seq": "the publisher's own number of the last message applied, -1 none",
            "age_seconds": "since the publisher's last message, -1 none yet",
            "coverage": "part of this generation's messages that went on, -1 unknown",
            "offered": "1 while the publisher's blocks are offered",
        }
        families = {
            name: GaugeMetricFamily(f"kvroute_router_stream_{name}", text, labels=labels)
            for name, text in names.items()
        }
        now = time.time()
        for (source, instance_id, rank), standing in self._spaces.standings.all().items():
            own = (source, instance_id, str(rank))
            for word in StreamState:
                state.add_metric((*own, word), float(standing.state is word))
            answer = standing.answer(now)
            for name, family in families.items():
                value = answer["age" if name == "age_seconds" else name]
                family.add_metric(own, -1.0 if value is None else float(value))
        yield from (state, *families.values())
