"""The life of a replica: stand by, take the lease, work, lose or give up the lease."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from faststream.nats import NatsBroker
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from redis.exceptions import RedisError

from schemas.events import BodyError, EventBatch, decode_event_batch
from schemas.registry import RetiredRecord
from schemas.subjects import EVENTS_STREAM, MATCHER_CONSUMER, unescape
from services.matcher import metrics
from services.matcher.fences import Fences
from services.matcher.lease import Lease
from services.matcher.reconcile import batch_problem, problem
from services.matcher.registrations import Registrations
from services.matcher.reporting import Reporter
from services.matcher.settings import MatcherSettings
from services.matcher.state import FencedError, SpaceKey
from services.matcher.store import MatcherStore
from services.matcher.subscription import (
    is_missing,
    make_subscriber,
    recreate_consumer,
    sequence_of,
    start_sequence,
    start_subscriber,
)
from services.matcher.worker import Incoming, Matcher
from services.runtime.accounts import OTHERS, Accounts, PublisherKey
from services.runtime.dead_letters import put_aside
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger
from services.runtime.registry_store import RegistryWatch
from services.runtime.tasks import end_tasks

EXPIRE_LIMIT = 1000
FINISH_SECONDS = 5.0
STOP_SHARE = 1.4
STALLED_SECONDS = 5.0
RETRY_SECONDS = 0.5
PRUNE_SECONDS = 600.0
INFRASTRUCTURE = (FencedError, NatsError, RedisError, OSError, TimeoutError)

log = get_logger("leadership")


class Replica:
    """One matcher process: at work while it holds the lease, standing by otherwise."""

    def __init__(
        self,
        nc: Client,
        js: JetStreamContext,
        broker: NatsBroker,
        redis_client: Any,
        store: MatcherStore,
        reporter: Reporter,
        health: Health,
        settings: MatcherSettings,
        make_streams: Callable[[], Awaitable[None]],
        finish_seconds: float = FINISH_SECONDS,
    ) -> None:
        self.accounts = Accounts(lambda key: self.fences.has(key))
        self._registrations: Registrations | None = None
        self._nc = nc
        self._js = js
        self._broker = broker
        self._store = store
        self._reporter = reporter
        self._health = health
        self._settings = settings
        self._make_streams = make_streams
        self._finish_seconds = finish_seconds
        self._lease = Lease(redis_client, settings.key_prefix, settings.lease_ttl)
        self._warnings = RateLimited()
        self._gone: asyncio.Queue[list[RetiredRecord]] = asyncio.Queue()
        self._busy: asyncio.Task[None] | None = None
        self._matcher: Matcher | None = None
        self._lost = asyncio.Event()
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._position = 0
        self._worked_at = 0.0
        self.fences = Fences()

    def registry_changed(self, registry: Any) -> None:
        """Take over a new view of the registry."""
        retired = self.fences.set_registry(registry)
        if retired and self._matcher is not None:
            self._gone.put_nowait(retired)

    def start(self, watch: RegistryWatch) -> None:
        """Begin to stand by and to work, in turns, until `stop`. watch: tells the registry's changes."""
        self._registrations = Registrations(self._js, self.fences, watch)
        self._running = asyncio.create_task(self._run(), name="replica")

    async def stop(self) -> None:
        """Finish the batch at work, give up the lease and end."""
        self._stopping.set()
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=self._finish_seconds * STOP_SHARE)
            await end_tasks([self._running])

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                acquired = await self._lease.acquire()
                self._health.set("redis", True)
            except (RedisError, OSError, TimeoutError) as error:
                self._trouble("redis", f"Redis cannot be reached: {str(error) or type(error).__name__}")
                await self._pause(RETRY_SECONDS)
                continue
            if not acquired:
                self._health.note("role", "standing by: another matcher is at work")
                self._health.set("role", True)
                await self._pause(self._settings.lease_ttl / 6)
                continue
            self._health.note("role", f"at work, epoch {self._lease.epoch}")
            metrics.LEADER.set(1)
            try:
                await self._lead()
            except (RedisError, NatsError, OSError, TimeoutError) as error:
                self._trouble("role", f"cannot work: {str(error) or type(error).__name__}")
                await self._pause(RETRY_SECONDS)
            finally:
                metrics.LEADER.set(0)
                await self._lease.release()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _lead(self) -> None:
        await self._make_streams()
        info = await self._js.stream_info(EVENTS_STREAM)
        created = int(info.created.timestamp() * 1000) if info.created else 0
        position = await self._lease.position(created)
        first = await start_sequence(self._js, position)
        await recreate_consumer(self._js, first)
        self._position = first - 1
        self._lost.clear()
        self._worked_at = time.monotonic()
        self._matcher = Matcher(
            self._store,
            self._js,
            self.fences,
            self._reporter,
            self._health,
            self._lease.epoch,
            created,
            self._make_streams,
            self.accounts,
        )
        self._gone = asyncio.Queue()
        if self.fences.retired:
            # The leader before may have died between an unregistration and its end.
            self._gone.put_nowait(list(self.fences.retired))
        subscriber = make_subscriber(self._broker, self._handler(created), self._settings.batch_size)
        await start_subscriber(subscriber, self._settings.batch_size)
        self._health.set("role", True)
        log.info("leading", epoch=self._lease.epoch, first_sequence=first)
        watchers: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._lease.keep(), name="lease"),
            asyncio.create_task(self._sweep(), name="sweep"),
            asyncio.create_task(self._forget_gone(), name="forget"),
            asyncio.create_task(self._watch_stream(created), name="stream"),
            asyncio.create_task(self._lost.wait(), name="lost"),
            asyncio.create_task(self._stopping.wait(), name="stopping"),
        ]
        try:
            await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            results = await end_tasks(watchers)
            if self._busy is not None:
                await asyncio.wait({self._busy}, timeout=self._finish_seconds)
            with contextlib.suppress(NatsError, TimeoutError, OSError):
                await subscriber.stop()
            if self._busy is not None:
                await end_tasks([self._busy])
            self._matcher = None
            reasons = [str(result) for result in results if isinstance(result, Exception | str) and str(result)]
            log.info("stopped_leading", epoch=self._lease.epoch, reasons=reasons)

    def _handler(self, created: int) -> Any:
        async def on_batch(messages: list[Msg]) -> None:
            matcher = self._matcher
            if matcher is None or self._lost.is_set():
                return
            self._busy = asyncio.create_task(self._work(matcher, messages, created), name="batch")
            await asyncio.shield(self._busy)

        return on_batch

    async def _work(self, matcher: Matcher, messages: Sequence[Msg], created: int) -> None:
        try:
            fresh = await self._in_sequence(messages)
            if not fresh:
                if not self._lost.is_set():
                    # All done before, but the acknowledgement was lost; without one they would come again for ever.
                    with contextlib.suppress(NatsError, OSError):
                        await messages[-1].ack()
                return
            await self._process(matcher, fresh)
            self._position = fresh[-1][0]
        except FencedError as error:
            log.warning("fenced", error=str(error))
            self._lost.set()
            return
        except (NatsError, OSError, TimeoutError) as error:
            self._trouble("nats", f"NATS does not answer: {str(error) or type(error).__name__}")
            self._lost.set()
            return
        except Exception:
            log.exception("batch_failed")
            self._lost.set()
            return
        self._worked_at = time.monotonic()
        # The batch is done and published. Without this note of it, it is repeated at most, which changes nothing.
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._lease.set_position(created, self._position)
        with contextlib.suppress(NatsError, OSError):
            await fresh[-1][1].ack()

    async def _process(self, matcher: Matcher, fresh: Sequence[tuple[int, Msg]]) -> None:
        """Process messages; one that makes processing fail is put aside at first sight, the others go on without it.

        Raises FencedError, and what says that a server is away.
        """
        incoming = [await self._read(sequence, message) for sequence, message in fresh]
        try:
            await matcher.process(incoming)
        except INFRASTRUCTURE:
            raise
        except Exception as error:
            log.warning("batch_failed", messages=len(incoming), error=str(error) or type(error).__name__)
        else:
            return
        for one, (_, message) in zip(incoming, fresh, strict=True):
            try:
                await matcher.process([one])
            except INFRASTRUCTURE:
                raise
            except Exception as error:
                log.exception("message_failed", subject=message.subject, sequence=one.sequence)
                await put_aside(self._nc, "matcher", message, str(error) or type(error).__name__)
                matcher.give_up(one)

    async def _in_sequence(self, messages: Sequence[Msg]) -> list[tuple[int, Msg]]:
        """The messages that come next, without repeated ones and up to the first that a delivery has lost.

        JetStream takes what it sent into a broken connection for delivered, and acknowledging the messages behind it
        would acknowledge it too. The consumer is then made anew at the lost message.
        """
        fresh: list[tuple[int, Msg]] = []
        expected = self._position + 1
        for message in messages:
            sequence = sequence_of(message)
            if sequence < expected:
                continue
            if sequence > expected and await is_missing(self._js, expected, sequence - 1):
                log.warning("delivery_lost", first=expected, last=sequence - 1)
                self._lost.set()
                break
            if sequence > expected:
                metrics.SKIPPED.inc(sequence - expected)
                if self._warnings.allow("skipped") is not None:
                    log.warning("stream_has_no_longer", first=expected, last=sequence - 1)
            fresh.append((sequence, message))
            expected = sequence + 1
        return fresh

    async def _read(self, sequence: int, message: Msg) -> Incoming:
        batch: EventBatch | None = None
        try:
            batch = decode_event_batch(message.data)
            reason = batch_problem(batch)
        except BodyError as error:
            reason = str(error)
        reasons = [reason] if reason else [text for text in map(problem, batch.events if batch else ()) if text]
        if reasons:
            if self._warnings.allow("body") is not None:
                log.warning("message_refused", subject=message.subject, sequence=sequence, error=reasons[0])
            await put_aside(self._nc, "matcher", message, reasons[0])
        if batch is None or reason:
            return Incoming(sequence, None, _publisher_of(message.subject))
        known = self._registrations is None or await self._registrations.know(batch)
        return Incoming(sequence, batch, (batch.source, batch.instance_id, batch.dp_rank), known)

    async def _sweep(self) -> None:
        pruned, gone_before = time.monotonic(), set[tuple[SpaceKey, str]]()
        while True:
            await asyncio.sleep(self._settings.sweep_interval)
            try:
                spaces = await self._store.spaces()
                for space in spaces:
                    await self._sweep_space(space)
                if time.monotonic() - pruned > PRUNE_SECONDS:
                    pruned = time.monotonic()
                    gone_before = await self._prune(spaces, gone_before)
            except FencedError:
                self._lost.set()
                return
            except (RedisError, OSError, TimeoutError) as error:
                self._trouble("redis", f"Redis cannot be reached: {str(error) or type(error).__name__}")

    async def _prune(
        self, spaces: Sequence[SpaceKey], gone_before: set[tuple[SpaceKey, str]]
    ) -> set[tuple[SpaceKey, str]]:
        """Forget the generations of publishers that the registry did not have the last time either; who is gone now."""
        gone: set[tuple[SpaceKey, str]] = set()
        for space in spaces:
            here = await self._store.publishers(space) - self.fences.groups()
            await self._store.forget_publishers(
                space, self._lease.epoch, [group for group in here if (space, group) in gone_before]
            )
            gone.update((space, group) for group in here if (space, group) not in gone_before)
        return gone

    async def _sweep_space(self, space: tuple[str, str]) -> None:
        while True:
            expired = await self._store.expire(space, self._lease.epoch, int(time.time() * 1000), EXPIRE_LIMIT)
            remaining = await self._store.pending(space)
            if self.fences.is_configured(space):
                metrics.PENDING.labels(*space).set(remaining)
            if not expired:
                return
            self._reporter.expired(space, expired, remaining, self._settings.pending_ttl)

    async def _forget_gone(self) -> None:
        gone = self._gone
        while True:
            tombstones = await gone.get()
            matcher = self._matcher
            if matcher is None:
                return
            try:
                await matcher.forget(tombstones)
            except FencedError:
                self._lost.set()
                return

    async def _watch_stream(self, created: int) -> str:
        """Ends when the subscription no longer delivers what the stream has, or the stream is another one."""
        behind_since: float | None = None
        while True:
            await asyncio.sleep(1.0)
            try:
                info = await self._js.stream_info(EVENTS_STREAM)
                consumer = await self._js.consumer_info(EVENTS_STREAM, MATCHER_CONSUMER)
            except NotFoundError:
                return "KV_EVENTS or its consumer is gone"
            except (NatsError, OSError, TimeoutError):
                continue
            if int(info.created.timestamp() * 1000 if info.created else 0) != created:
                return "KV_EVENTS was made anew"
            delivered = consumer.delivered.stream_seq if consumer.delivered else 0
            lost = bool(consumer.num_ack_pending) and delivered > self._position
            working = self._busy is not None and not self._busy.done()
            if working or not (consumer.num_pending or lost):
                behind_since = None
            elif behind_since is None:
                behind_since = time.monotonic()
            elif time.monotonic() - max(behind_since, self._worked_at) > STALLED_SECONDS:
                return f"no message for {STALLED_SECONDS} s although the stream has some"

    def _trouble(self, condition: str, reason: str) -> None:
        self._health.set(condition, False, reason)
        if self._warnings.allow(condition) is not None:
            log.warning("waiting", on=condition, error=reason)


def _publisher_of(subject: str) -> PublisherKey:
    """Whose events a subject carries; what the body says is not known."""
    with contextlib.suppress(ValueError, IndexError):
        _, _, source, _, instance_id, dp_rank = subject.split(".")
        return source, unescape(instance_id), int(dp_rank)
    return OTHERS
