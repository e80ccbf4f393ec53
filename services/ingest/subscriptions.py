"""Sockets follow the registry: opened for what appears, closed for what is gone, kept for what stays."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

import zmq

from schemas.registry import EngineRecord, PoolRecord
from services.ingest.arrivals import Lifetime
from services.ingest.batching import BatchBuffer
from services.ingest.cursors import Cursor
from services.ingest.holding import HoldLimits
from services.ingest.intake import DROPPED_SHUTDOWN, DROPPED_UNREGISTERED, Intake
from services.ingest.lane import Lane
from services.ingest.outcomes import MemoryBudget, Outcome
from services.ingest.publishing import BatchPublisher
from services.ingest.registrations import Publisher, PublisherKey, publishers_by_key
from services.ingest.repair import RepairPolicy
from services.ingest.repairs import Repairs
from services.ingest.settings import IngestSettings
from services.ingest.stream import Stream
from services.ingest.zmq_sockets import MAX_SOCKETS, Link, SocketOptions, SubscriberSocket

_LITERAL_ADDRESS = re.compile(r"tcp://(\d{1,3}(\.\d{1,3}){3}|\[[0-9a-fA-F:.%\w]+\]):\d+")

Position = Callable[[Publisher], Awaitable[tuple[int, Cursor | None]]]
LifetimeKey = tuple[str, str, int]


@dataclass(slots=True)
class Subscription:
    """A publisher with its socket. error: why there is none. ready: it is known where an earlier ingest stopped."""

    intake: Intake
    lane: Lane
    socket: SubscriberSocket | None = None
    opening: asyncio.Task[None] | None = None
    error: str = ""
    ready: bool = False
    ever_connected: bool = False
    attempts: int = 0
    refused: int = 0
    since: float = field(default_factory=time.time)

    @property
    def publisher(self) -> Publisher:
        """What is subscribed to."""
        return self.intake.publisher


class Subscriptions:
    """All subscriptions.

    report is told of every message and every change of a connection. position_of: the stream sequence
    of a publisher's newest stored batch, and how far it was published."""

    def __init__(
        self,
        settings: IngestSettings,
        batches: BatchPublisher,
        position_of: Position,
        report_message: Callable[[Intake, Outcome], None],
        report_link: Callable[[Subscription, Link], None],
        report_failure: Callable[[Publisher, Exception], None],
    ) -> None:
        self._settings = settings
        self._batches = batches
        self._position_of = position_of
        self._report_message = report_message
        self._report_link = report_link
        self._report_failure = report_failure
        self._budget = MemoryBudget(settings.buffer_bytes)
        self._lifetimes: dict[LifetimeKey, Lifetime] = {}
        self._subscriptions: dict[PublisherKey, Subscription] = {}
        # Names are looked up inside a context's I/O thread: a slow resolver must not hold up literal addresses.
        self._contexts = {literal: _context() for literal in (True, False)}
        self._options = SocketOptions(
            settings.receive_high_water_mark,
            settings.max_message_bytes,
            settings.reconnect_min,
            settings.reconnect_max,
        )
        self.repairs = Repairs(
            lambda endpoint: self._contexts[_LITERAL_ADDRESS.fullmatch(endpoint) is not None],
            self._options,
            RepairPolicy(attempts=settings.replay_attempts, verify=settings.verify_interval),
            settings.replay_timeout,
            settings.max_replays,
            self._conclude,
        )

    def __iter__(self) -> Iterator[Subscription]:
        return iter(list(self._subscriptions.values()))

    def __len__(self) -> int:
        return len(self._subscriptions)

    @property
    def buffered_bytes(self) -> int:
        """Estimate of what all buffers hold."""
        return self._budget.used

    def apply(self, records: Iterable[EngineRecord | PoolRecord]) -> None:
        """Follow the registry: this is all that is registered now."""
        wanted = publishers_by_key(records)
        for key in self._subscriptions.keys() - wanted.keys():
            self._remove(key)
        self._settle_lifetimes(wanted)
        for key, publisher in wanted.items():
            existing = self._subscriptions.get(key)
            if existing is None:
                self._add(publisher)
            elif existing.publisher != publisher:
                existing.intake.publisher = existing.lane.publisher = publisher
                existing.intake.stream.repairable = publisher.replay_endpoint is not None
                existing.intake.ranks.shared = publisher.shared

    async def look_after(self) -> None:
        """Run what streams need time for (replays); for as long as ingest listens."""
        await self.repairs.run(lambda: [subscription.intake for subscription in self if subscription.ready])

    def resync(self, source: str, instance_id: str, dp_rank: int | None = None) -> int:
        """Begin a new generation from what the named publishers can still tell; how many there are."""
        found = 0
        for key, subscription in list(self._subscriptions.items()):
            if (key.source, key.instance_id) == (source, instance_id) and dp_rank in (None, key.dp_rank):
                found += 1
                self._conclude(subscription.intake, subscription.intake.resync(time.time()))
        return found

    def retry_failed(self) -> None:
        """Try again to open what could not be opened."""
        for subscription in list(self._subscriptions.values()):
            if subscription.socket is None:
                self._open(subscription)

    def stop_receiving(self) -> None:
        """Take what has arrived, then close every socket; what was received stays in the buffers."""
        self.repairs.close()
        for subscription in self._subscriptions.values():
            if subscription.socket is not None:
                subscription.socket.drain(self._settings.receive_high_water_mark)
            _close(subscription)

    def close(self) -> None:
        """Give up what is still buffered, counted, and let go of ZMQ."""
        for subscription in self._subscriptions.values():
            _close(subscription)
            subscription.intake.discard(DROPPED_SHUTDOWN)
        for context in self._contexts.values():
            context.destroy(linger=0)

    def _settle_lifetimes(self, wanted: dict[PublisherKey, Publisher]) -> None:
        lifetimes: dict[LifetimeKey, Lifetime] = {}
        for key, publisher in wanted.items():
            name = key[:3]
            generation = publisher.record.generation
            lifetime = lifetimes[name] = self._lifetimes.get(name) or Lifetime(generation)
            if generation > lifetime.generation:
                lifetime.generation = generation
                for other, subscription in self._subscriptions.items():
                    if other[:3] == name:
                        self._conclude(subscription.intake, subscription.intake.renew(time.time()))
        self._lifetimes = lifetimes

    def _add(self, publisher: Publisher) -> None:
        settings = self._settings
        lifetime = self._lifetimes[publisher.key[:3]]
        intake = Intake(
            publisher,
            Stream(
                lifetime,
                primary=publisher.primary,
                repairable=publisher.replay_endpoint is not None,
                limits=HoldLimits(settings.hold_messages, settings.hold_bytes),
            ),
            BatchBuffer(settings.max_batch_events, settings.max_batch_bytes),
            self._budget,
            settings.buffer_bytes_per_publisher,
            settings.max_payload_bytes,
        )
        lane = self._batches.add(publisher, intake.buffer, intake.batch_stored, intake.batch_refused, intake.overtaken)
        subscription = self._subscriptions[publisher.key] = Subscription(intake, lane)
        self._open(subscription)

    def _remove(self, key: PublisherKey) -> None:
        subscription = self._subscriptions.pop(key)
        _close(subscription)
        self.repairs.end(subscription.intake)
        self._batches.remove(subscription.lane)
        subscription.intake.discard(DROPPED_UNREGISTERED)

    def _open(self, subscription: Subscription) -> None:
        if len(self._subscriptions) > self._settings.max_publishers:
            subscription.error = f"more than max_publishers={self._settings.max_publishers} registered"
            return
        endpoint = subscription.publisher.key.endpoint
        try:
            subscription.socket = SubscriberSocket(
                self._contexts[_LITERAL_ADDRESS.fullmatch(endpoint) is not None],
                endpoint,
                self._options,
                lambda frames: self._on_message(subscription, frames),
                lambda link: self._on_link(subscription, link),
            )
        except zmq.ZMQError as error:
            subscription.error = f"cannot subscribe to {endpoint}: {error}"
            return
        subscription.error = ""
        subscription.opening = asyncio.create_task(self._start(subscription, subscription.socket))

    async def _start(self, subscription: Subscription, socket: SubscriberSocket) -> None:
        """Learn where an earlier ingest stopped, then read. Messages wait in the socket meanwhile."""
        stream, publisher = subscription.intake.stream, subscription.publisher
        newest, cursor = await self._position_of(publisher)
        subscription.lane.newest = newest
        if cursor is not None and cursor.generation >= stream.lifetime.generation:
            stream.lifetime.generation = cursor.generation
            subscription.intake.continue_from(cursor if publisher.sole else None)
        subscription.ready = True
        socket.start()
        self.repairs.look_at(subscription.intake)

    def _on_message(self, subscription: Subscription, frames: list[bytes]) -> None:
        try:
            self._conclude(subscription.intake, subscription.intake.handle(frames, time.time()))
            self.repairs.look_at(subscription.intake)
        except Exception as error:  # one message must never end the reading of a socket
            self._report_failure(subscription.publisher, error)

    def _conclude(self, intake: Intake, outcomes: list[Outcome]) -> None:
        if len(intake.buffer):
            subscription = self._subscriptions.get(intake.publisher.key)
            if subscription is not None:
                self._batches.offer(subscription.lane)
        for outcome in outcomes:
            self._report_message(intake, outcome)

    def _on_link(self, subscription: Subscription, link: Link) -> None:
        if link is Link.CONNECTED:
            subscription.ever_connected = True
            self._conclude(subscription.intake, subscription.intake.connected(True, time.time()))
        elif link is Link.DISCONNECTED:
            self._conclude(subscription.intake, subscription.intake.connected(False, time.time()))
        elif link is Link.RETRIED:
            subscription.attempts += 1
        else:
            subscription.refused += 1
        self._report_link(subscription, link)
        if subscription.ready:
            self.repairs.look_at(subscription.intake)


def _context() -> "zmq.Context[zmq.Socket[bytes]]":
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def _close(subscription: Subscription) -> None:
    if subscription.opening is not None:
        subscription.opening.cancel()
    if subscription.socket is not None:
        subscription.socket.close()
