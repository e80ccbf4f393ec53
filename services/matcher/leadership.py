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

from schemas.events import BodyError, Holder, decode_event_batch
from schemas.subjects import EVENTS_STREAM
from services.matcher import metrics
from services.matcher.fences import Fences
from services.matcher.lease import Lease
from services.matcher.reporting import Reporter
from services.matcher.settings import MatcherSettings
from services.matcher.state import FencedError
from services.matcher.store import MatcherStore
from services.matcher.subscription import make_subscriber, recreate_consumer, start_sequence
from services.matcher.worker import Incoming, Matcher
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger

DEAD_SUBJECT = "kv.dead.matcher"
EXPIRE_LIMIT = 1000
FINISH_SECONDS = 5.0
STALLED_SECONDS = 5.0
RETRY_SECONDS = 0.5

log = get_logger("leadership")


class Replica:
    """One matcher process; `run` never returns by itself."""

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
    ) -> None:
        self._nc = nc
        self._make_streams = make_streams
        self._js = js
        self._broker = broker
        self._store = store
        self._reporter = reporter
        self._health = health
        self._settings = settings
        self._lease = Lease(redis_client, settings.key_prefix, settings.lease_ttl)
        self._warnings = RateLimited()
        self._gone: asyncio.Queue[list[Holder]] = asyncio.Queue()
        self._busy: asyncio.Task[None] | None = None
        self._matcher: Matcher | None = None
        self._lost = asyncio.Event()
        self._position = 0
        self._worked_at = 0.0
        self.fences = Fences()

    def registry_changed(self, registry: Any) -> None:
        """Take over a new view of the registry."""
        gone = self.fences.set_registry(registry)
        if gone and self._matcher is not None:
            self._gone.put_nowait(gone)

    async def run(self) -> None:
        """Stand by and work, in turns, for ever."""
        while True:
            try:
                acquired = await self._lease.acquire()
                self._health.set("redis", True)
            except (RedisError, OSError, TimeoutError) as error:
                self._trouble("redis", f"Redis cannot be reached: {str(error) or type(error).__name__}")
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if not acquired:
                self._health.note("role", "standing by: another matcher is at work")
                self._health.set("role", True)
                await asyncio.sleep(self._settings.lease_ttl / 6)
                continue
            self._health.note("role", f"at work, epoch {self._lease.epoch}")
            metrics.LEADER.set(1)
            try:
                await self._lead()
            except (RedisError, NatsError, OSError, TimeoutError) as error:
                self._trouble("role", f"cannot work: {str(error) or type(error).__name__}")
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                metrics.LEADER.set(0)
                await self._lease.release()

    async def _lead(self) -> None:
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
        )
        taken: asyncio.Queue[Msg] = asyncio.Queue(self._settings.batch_size)
        subscriber = make_subscriber(self._broker, taken.put)
        await subscriber.start()
        self._health.set("role", True)
        log.info("leading", epoch=self._lease.epoch, first_sequence=first)
        watchers = [
            asyncio.create_task(self._lease.keep(), name="lease"),
            asyncio.create_task(self._consume(taken, created), name="consume"),
            asyncio.create_task(self._sweep(), name="sweep"),
            asyncio.create_task(self._forget_gone(), name="forget"),
            asyncio.create_task(self._watch_stream(created), name="stream"),
            asyncio.create_task(self._lost.wait(), name="lost"),
        ]
        try:
            await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watcher in watchers:
                watcher.cancel()
            results = await asyncio.gather(*watchers, return_exceptions=True)
            if self._busy is not None:
                await asyncio.wait({self._busy}, timeout=FINISH_SECONDS)
            with contextlib.suppress(NatsError, TimeoutError, OSError):
                await subscriber.stop()
            if self._busy is not None:
                self._busy.cancel()
                await asyncio.gather(self._busy, return_exceptions=True)
            self._matcher = None
            reasons = [str(result) for result in results if isinstance(result, Exception | str) and str(result)]
            log.info("stopped_leading", epoch=self._lease.epoch, reasons=reasons)

    async def _consume(self, taken: asyncio.Queue[Msg], created: int) -> None:
        """Whatever has come while the last batch was on its way is the next batch."""
        while not self._lost.is_set():
            messages = [await taken.get()]
            while not taken.empty() and len(messages) < self._settings.batch_size:
                messages.append(taken.get_nowait())
            matcher = self._matcher
            if matcher is None:
                return
            self._busy = asyncio.create_task(self._work(matcher, messages, created), name="batch")
            await asyncio.shield(self._busy)

    async def _work(self, matcher: Matcher, messages: Sequence[Msg], created: int) -> None:
        fresh = [message for message in messages if message.metadata.sequence.stream > self._position]
        if not fresh:
            return
        try:
            await matcher.process([await self._read(message) for message in fresh])
            self._position = fresh[-1].metadata.sequence.stream
            await self._lease.set_position(created, self._position)
        except FencedError as error:
            log.warning("fenced", error=str(error))
            self._lost.set()
            return
        except (RedisError, OSError, TimeoutError) as error:
            # The batch is done and published; only the note of it is missing, which costs a repetition at most.
            log.info("position_not_stored", error=str(error))
        except Exception:
            log.exception("batch_failed")
            self._lost.set()
            return
        self._worked_at = time.monotonic()
        with contextlib.suppress(NatsError, OSError):
            await fresh[-1].ack()

    async def _read(self, message: Msg) -> Incoming:
        sequence = message.metadata.sequence.stream
        try:
            return Incoming(sequence, decode_event_batch(message.data))
        except BodyError as error:
            if self._warnings.allow("body") is not None:
                log.warning("message_refused", subject=message.subject, sequence=sequence, error=str(error))
            await self._nc.publish(DEAD_SUBJECT, message.data)
            return Incoming(sequence, None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval)
            try:
                for space in await self._store.spaces():
                    await self._sweep_space(space)
            except FencedError:
                self._lost.set()
                return
            except (RedisError, OSError, TimeoutError) as error:
                self._trouble("redis", f"Redis cannot be reached: {str(error) or type(error).__name__}")

    async def _sweep_space(self, space: tuple[str, str]) -> None:
        while True:
            expired = await self._store.expire(space, self._lease.epoch, int(time.time() * 1000), EXPIRE_LIMIT)
            remaining = await self._store.pending(space)
            if self.fences.is_configured(space[0]):
                metrics.PENDING.labels(*space).set(remaining)
            if not expired:
                return
            self._reporter.expired(space, expired, remaining, self._settings.pending_ttl)

    async def _forget_gone(self) -> None:
        while True:
            holders = await self._gone.get()
            matcher = self._matcher
            if matcher is None:
                return
            try:
                await matcher.forget(holders)
            except FencedError:
                self._lost.set()
                return
            except (RedisError, OSError, TimeoutError) as error:
                self._trouble("redis", f"Redis cannot be reached: {str(error) or type(error).__name__}")
                await asyncio.sleep(RETRY_SECONDS)
                self._gone.put_nowait(holders)

    async def _watch_stream(self, created: int) -> str:
        """Ends when the subscription no longer delivers what the stream has, or the stream is another one."""
        behind_since: float | None = None
        while True:
            await asyncio.sleep(1.0)
            try:
                info = await self._js.stream_info(EVENTS_STREAM)
            except NotFoundError:
                await self._make_streams()
                return "KV_EVENTS was deleted"
            except (NatsError, OSError, TimeoutError):
                continue
            if int(info.created.timestamp() * 1000 if info.created else 0) != created:
                return "KV_EVENTS was made anew"
            working = self._busy is not None and not self._busy.done()
            if info.state.last_seq <= self._position or working:
                behind_since = None
            elif behind_since is None:
                behind_since = time.monotonic()
            elif time.monotonic() - max(behind_since, self._worked_at) > STALLED_SECONDS:
                return f"no message for {STALLED_SECONDS} s although the stream has some"

    def _trouble(self, condition: str, reason: str) -> None:
        self._health.set(condition, False, reason)
        if self._warnings.allow(condition) is not None:
            log.warning("waiting", on=condition, error=reason)
