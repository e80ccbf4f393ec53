"""Follows KV_INDEX with an ordered consumer and applies it, in slices, to the spaces; behind a snapshot if there is.

Supervised: whatever happens to server, stream or consumer, it subscribes again behind the last applied message. When
the stream itself was lost and made anew, or lost messages that were not read yet, everything is forgotten and read
again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, StreamInfo
from nats.js.errors import NotFoundError

from schemas.events import BodyError, decode_index_batch
from schemas.subjects import INDEX_ALL, INDEX_STREAM
from services.router import metrics
from services.router.progress import Progress
from services.router.spaces import Spaces
from services.runtime.dead_letters import put_aside
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger
from services.runtime.tasks import end_tasks

SLICE_SECONDS = 0.002
IDLE_SECONDS = 1.0
STALLED_SECONDS = 3.0
RECONNECT_POLL_SECONDS = 0.1
RETRY_SECONDS = 0.5
TIDY_SECONDS = 60.0
MAX_PENDING_MESSAGES = 1_000_000

log = get_logger("consumer")


class IndexConsumer:
    """Keeps `spaces` up to date.

    position: the last sequence of KV_INDEX that is applied; stream: when that was created.
    restore_streams: makes the streams again when they are found missing.
    """

    def __init__(
        self,
        nc: Client,
        js: JetStreamContext,
        spaces: Spaces,
        health: Health,
        catch_up_timeout: float,
        restore_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._nc = nc
        self._js = js
        self._spaces = spaces
        self._progress = Progress(health, spaces, catch_up_timeout)
        self._restore_streams = restore_streams
        self._known_hole = 0
        self._between_messages = asyncio.Lock()
        self._tidied = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._advanced = asyncio.Event()
        self._warnings = RateLimited()
        self.position = 0
        self.stream = 0
        spaces.on_refused = self._warn_refused

    @property
    def caught_up(self) -> bool:
        """Whether what the stream held at the last look has been applied."""
        return self._progress.caught_up

    def resume(self, stream: int, position: int) -> None:
        """Go on behind a snapshot; called before `start`, or while paused."""
        self.stream, self.position = stream, position

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing is applied inside, and no message is half applied."""
        async with self._between_messages:
            yield

    def start(self) -> None:
        """Begin to follow; readiness (condition `index`) comes when what the stream holds now is applied."""
        self._progress.begin()
        self._task = asyncio.create_task(self._follow(), name="index-consumer")

    async def stop(self) -> None:
        """Stop following, between two messages: what is half applied is finished. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            async with self.paused():
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
            if not self._nc.is_connected:
                # A question asked now would only be lost and keep this task waiting for its answer.
                self._progress.lost("NATS is away; queries are answered from what is known")
                await asyncio.sleep(RECONNECT_POLL_SECONDS)
                continue
            try:
                await self._follow_once()
            except NotFoundError:
                self._progress.lost("the stream KV_INDEX is missing, making it again")
                log.warning("index_stream_missing", position=self.position)
                await asyncio.sleep(RETRY_SECONDS)
                await self._restore_streams()
            except (NatsError, TimeoutError, OSError) as error:
                text = str(error) or type(error).__name__
                self._progress.lost(f"KV_INDEX cannot be read: {text}")
                if self._warnings.allow("lost") is not None:
                    log.info("index_stream_lost", error=text)
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow_once(self) -> None:
        """Subscribe and apply until something is wrong with the subscription."""
        await self._check_stream(await self._js.stream_info(INDEX_STREAM))
        reconnects = self._nc.stats["reconnects"]
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self.position + 1)
        subscription = await self._js.subscribe(
            INDEX_ALL,
            stream=INDEX_STREAM,
            ordered_consumer=True,
            config=config,
            pending_msgs_limit=MAX_PENDING_MESSAGES,
        )
        self._progress.report(self.position)
        behind_since = None
        try:
            while self._nc.stats["reconnects"] == reconnects:
                try:
                    message = await subscription.next_msg(timeout=IDLE_SECONDS)
                except TimeoutError:
                    if not self._nc.is_connected:
                        return
                    info = await self._js.stream_info(INDEX_STREAM)
                    if await self._check_stream(info):
                        return
                    async with self._between_messages:
                        await self._tidy()
                    last = info.state.last_seq
                    if last <= self.position:
                        behind_since = None
                    elif behind_since is None:
                        behind_since = time.monotonic()
                    elif time.monotonic() - behind_since > STALLED_SECONDS:
                        log.warning("index_consumer_stalled", position=self.position, last=last)
                        return
                    continue
                behind_since = None
                if not self._follows_the_last(message):
                    return
                async with self._between_messages:
                    await self._apply(message)
                    if time.monotonic() - self._tidied > TIDY_SECONDS:
                        await self._tidy()
        finally:
            with contextlib.suppress(NatsError, TimeoutError, asyncio.CancelledError):
                await subscription.unsubscribe()

    async def _tidy(self) -> None:
        """Nothing came for a while, so there is time for what was left undone."""
        self._progress.report(self.position)
        await self._in_slices(iter(self._spaces.sweep, False))
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            self._spaces.tidy()
            self._tidied = time.monotonic()

    async def _check_stream(self, info: StreamInfo) -> bool:
        """Start over when the stream is another one than before, or has dropped messages that were not read yet.

        Whether it does.
        """
        state = info.state
        created = creation_of(info)
        replaced = bool(self.stream) and (created != self.stream or state.last_seq < self.position)
        cut = self.position > 0 and state.first_seq > self.position + 1
        if replaced or cut:
            log.warning(
                "index_starts_over",
                reason="the stream was replaced" if replaced else "the stream dropped messages that were not read",
                position=self.position,
                first=state.first_seq,
                last=state.last_seq,
            )
            async with self._between_messages:
                self._spaces.reset()
                self.position = self._known_hole = 0
            metrics.STARTS_OVER.labels("replaced" if replaced else "cut").inc()
            self._progress.lost("reading the stream from its beginning")
        self.stream = created
        if self.position == 0 and state.first_seq > 1:
            await self._say_incomplete(info)
        if state.messages == 0:
            # Nothing to read: an empty stream remembers how far it had counted.
            self.position = max(self.position, state.last_seq)
        self._progress.target(state.last_seq)
        return replaced or cut

    async def _say_incomplete(self, info: StreamInfo) -> None:
        """The stream's beginning is gone: what was stored before is missing here until publishers say it again."""
        state, began = info.state, time.time()
        if state.messages:
            first = await self._js.get_msg(INDEX_STREAM, seq=state.first_seq)
            began = first.time.timestamp() if first.time is not None else began
        self._spaces.incomplete_before = max(1, int(began * 1000))
        reason = f"KV_INDEX begins at {state.first_seq}: blocks stored before {_utc(began)} may be missing"
        metrics.HISTORY_INCOMPLETE.set(1)
        self._progress.note(reason)
        log.warning("index_history_incomplete", first=state.first_seq, messages=state.messages, before=_utc(began))

    def _follows_the_last(self, message: Msg) -> bool:
        """Whether nothing was skipped before this message. A hole that is still there at a second look is real."""
        sequence = message.metadata.sequence.stream
        if self.position == 0 or sequence <= self.position + 1 or sequence == self._known_hole:
            return True
        self._known_hole = sequence
        log.info("index_messages_skipped", position=self.position, next=sequence)
        return False

    async def _apply(self, message: Msg) -> None:
        sequence = message.metadata.sequence.stream
        if sequence <= self.position:
            return
        try:
            batch = decode_index_batch(message.data)
            await self._in_slices(self._spaces.apply(batch))
        except BodyError as error:
            await self._put_aside(message, str(error))
        except Exception as error:
            # Whatever is wrong with one message must not keep the others from being applied.
            log.exception("index_message_failed", subject=message.subject, sequence=sequence)
            await self._put_aside(message, type(error).__name__)
        for publisher, events in self._spaces.accounts.check_now_and_then().items():
            log.error("events_lost", publisher=publisher, events=events)
        self.position = sequence
        self._advanced.set()
        self._progress.report(self.position)

    async def _in_slices(self, work: Iterable[object]) -> None:
        """Run the work, letting others in every few milliseconds; holders that left are dropped a slice at a time."""
        slice_ends = time.perf_counter() + SLICE_SECONDS
        for _ in work:
            if time.perf_counter() > slice_ends:
                await asyncio.sleep(0)
                slice_ends = time.perf_counter() + SLICE_SECONDS
        if self._spaces.sweep():
            await asyncio.sleep(0)

    async def _put_aside(self, message: Msg, error: str) -> None:
        """Keep a message that cannot be applied for inspection."""
        metrics.REFUSED_BODIES.inc()
        self._spaces.accounts.give_up("failed")
        if self._warnings.allow("body") is not None:
            log.warning("index_message_refused", subject=message.subject, error=error)
        await put_aside(self._nc, "router", message, error)

    def _warn_refused(self, reason: str) -> None:
        held_back = self._warnings.allow(reason)
        if held_back is not None:
            log.warning("index_event_refused", reason=reason, held_back=held_back)


def creation_of(info: StreamInfo) -> int:
    """When a stream was created, in microseconds since the epoch: a stream made anew is another one."""
    return int(info.created.timestamp() * 1_000_000) if info.created else 0


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
