"""Follows KV_INDEX with an ordered consumer and applies it, in slices, to the spaces.

Supervised: whatever happens to server, stream or consumer, it subscribes again behind the last applied message. When
the stream itself was lost and made anew, everything is forgotten and read again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamInfo

from schemas.events import BodyError, decode_index_batch
from schemas.subjects import INDEX_ALL, INDEX_STREAM
from services.router import metrics
from services.router.spaces import ApplyCounts, Spaces
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger
from services.runtime.tasks import end_tasks

SLICE_SECONDS = 0.002
IDLE_SECONDS = 1.0
STALLED_SECONDS = 3.0
RETRY_SECONDS = 0.5
DEAD_SUBJECT = "kv.dead.router"
CONDITION = "index"

log = get_logger("consumer")


class IndexConsumer:
    """Keeps `spaces` up to date. position: the last sequence of KV_INDEX that is applied."""

    def __init__(
        self, nc: Client, js: JetStreamContext, spaces: Spaces, health: Health, catch_up_timeout: float
    ) -> None:
        self._nc = nc
        self._js = js
        self._spaces = spaces
        self._health = health
        self._catch_up_timeout = catch_up_timeout
        self._created: object = None
        self._target = 0
        self._started = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._advanced = asyncio.Event()
        self._warnings = RateLimited()
        self._reported = ApplyCounts()
        self.position = 0
        self.on_batch: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to follow; readiness (condition `index`) comes when what the stream holds now is applied."""
        self._health.set(CONDITION, False, "reading the stream has not begun")
        self._task = asyncio.create_task(self._follow(), name="index-consumer")

    async def stop(self) -> None:
        """Stop following. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def wait_for(self, sequence: int, timeout: float) -> bool:
        """Whether this sequence of KV_INDEX is applied within the timeout (read your writes)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.position < sequence:
                    self._advanced.clear()
                    await self._advanced.wait()
        return self.position >= sequence

    async def _follow(self) -> None:
        while True:
            try:
                await self._follow_once()
            except (NatsError, TimeoutError, OSError) as error:
                text = str(error) or type(error).__name__
                self._health.set(CONDITION, False, f"KV_INDEX cannot be read: {text}")
                if self._warnings.allow("lost") is not None:
                    log.info("index_stream_lost", error=text)
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow_once(self) -> None:
        info = await self._js.stream_info(INDEX_STREAM)
        self._check_stream(info)
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self.position + 1)
        subscription = await self._js.subscribe(
            INDEX_ALL, stream=INDEX_STREAM, ordered_consumer=True, config=config, pending_msgs_limit=100_000
        )
        self._report_progress()
        behind_since: float | None = None
        try:
            while True:
                try:
                    message = await subscription.next_msg(timeout=IDLE_SECONDS)
                except TimeoutError:
                    info = await self._js.stream_info(INDEX_STREAM)
                    if not self._same_stream(info):
                        return
                    if info.state.last_seq <= self.position:
                        behind_since = None
                    elif behind_since is None:
                        behind_since = time.monotonic()
                    elif time.monotonic() - behind_since > STALLED_SECONDS:
                        log.warning("index_consumer_stalled", position=self.position, last=info.state.last_seq)
                        return
                    self._report_progress()
                    self._spaces.drop_empty_spaces()
                    continue
                behind_since = None
                await self._apply(message)
        finally:
            with contextlib.suppress(NatsError, TimeoutError, asyncio.CancelledError):
                await subscription.unsubscribe()

    def _same_stream(self, info: StreamInfo) -> bool:
        return info.created == self._created and info.state.last_seq >= self.position

    def _check_stream(self, info: StreamInfo) -> None:
        if self._created is not None and not self._same_stream(info):
            log.warning("index_stream_replaced", position=self.position, last=info.state.last_seq)
            self._spaces.reset()
            self.position = 0
            self._target = 0
        self._created = info.created
        first = info.state.first_seq
        if info.state.messages and first > self.position + 1:
            log.warning("index_history_incomplete", first=first, position=self.position)
        if info.state.messages == 0:
            # Nothing to read: an empty stream remembers how far it had counted.
            self.position = max(self.position, info.state.last_seq)
        self._target = max(self._target, info.state.last_seq)

    async def _apply(self, message: Msg) -> None:
        sequence = message.metadata.sequence.stream
        if sequence <= self.position:
            return
        try:
            batch = decode_index_batch(message.data)
        except BodyError as error:
            metrics.REFUSED_BODIES.inc()
            if self._warnings.allow("body") is not None:
                log.warning("index_message_refused", subject=message.subject, sequence=sequence, error=str(error))
            await self._nc.publish(DEAD_SUBJECT, message.data)
        else:
            slice_ends = time.perf_counter() + SLICE_SECONDS
            for _ in self._spaces.apply(batch):
                if time.perf_counter() > slice_ends:
                    await asyncio.sleep(0)
                    slice_ends = time.perf_counter() + SLICE_SECONDS
        self.position = sequence
        self._advanced.set()
        self._report_progress()
        if self.on_batch is not None:
            self.on_batch()

    def _report_progress(self) -> None:
        metrics.POSITION.set(self.position)
        counts, before = self._spaces.counts, self._reported
        for name in ("applied", "retired_generation", "repeated_group", "refused"):
            grown = getattr(counts, name) - getattr(before, name)
            if grown:
                metrics.EVENTS.labels(name).inc(grown)
                setattr(before, name, getattr(counts, name))
        if self.position >= self._target:
            if self._health.set(CONDITION, True):
                log.info("index_caught_up", position=self.position, seconds=round(time.monotonic() - self._started, 3))
            return
        waited = time.monotonic() - self._started
        reason = f"catching up: {self.position} of {self._target} messages after {waited:.0f} s"
        if waited > self._catch_up_timeout:
            reason += f", later than the deadline of {self._catch_up_timeout:.0f} s (router.catch_up_timeout)"
        self._health.set(CONDITION, False, reason)
