"""Publish batches to JetStream: in order per publisher, every batch stored once, nothing lost in silence.

One batch of a publisher is on its way at a time; what arrives meanwhile is collected into the next one, so a slow
broker makes larger batches instead of a longer queue. A batch that is not acknowledged is sent again, the same bytes
under the same Nats-Msg-Id. After an outage near the broker's duplicate window the stream is asked first whether it
has the batch already.

Several ingests may follow one publisher. Each batch names the message it expects to be the newest of its subject, so
the broker takes it only when nobody else has stored something since; otherwise what the other one stored is read, what
it covers is dropped, and the rest is sent. So the stream holds every message of a publisher once, however replicas cut
their batches.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from schemas.events import EventBatch, encode
from schemas.subjects import EVENTS_STREAM
from services.ingest.batching import BatchBuffer
from services.ingest.lane import Lane, Sent, last_stored, newest_stored
from services.ingest.pending import PendingBatch
from services.ingest.registrations import Publisher
from services.runtime.tasks import end_tasks

HEADER_BYTES = 1024
MAX_CLIENT_BACKLOG_BYTES = 1024 * 1024
SWEEP_SECONDS = 0.1
RETRY_SECONDS = 0.5
TRUST_DUPLICATE_WINDOW_SECONDS = 60.0
STAND_BACK_SECONDS = 0.1
WRONG_LAST_SEQUENCE = 10071


class _Acknowledgement(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    error: dict[str, Any] | None = None


_acknowledgement_decoder = msgspec.json.Decoder(_Acknowledgement)


def _has_passed(stored: EventBatch, batch: PendingBatch, body: bytes) -> bool:
    """Whether the newest batch of a subject is the one on its way, or one after it."""
    newest, own = (stored.generation, stored.last_seq), (batch.generation, batch.last_seq)
    return newest > own or (newest == own and encode(stored) == body)


class BatchPublisher:
    """Sends what lanes hold. ``trouble`` says why nothing is stored at the moment, empty when all is well."""

    def __init__(self, nc: Client, js: JetStreamContext, linger: float, acknowledge_timeout: float) -> None:
        self._nc = nc
        self._js = js
        self._linger = linger
        self._acknowledge_timeout = acknowledge_timeout
        self._lanes: dict[int, Lane] = {}
        self._next_lane = 0
        self._due: dict[int, Lane] = {}
        self._wake = asyncio.Event()
        self._inbox = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Any = None
        self.trouble = ""
        self.no_stream = asyncio.Event()

    async def start(self) -> None:
        """Begin to send and to listen for acknowledgements."""
        self._inbox = self._nc.new_inbox()
        self._subscription = await self._nc.subscribe(
            f"{self._inbox}.*", cb=self._acknowledged, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._sweep())]

    async def stop(self, grace: float) -> None:
        """Send what is left, for ``grace`` seconds at most, then give up; lanes keep what could not be sent."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(len(lane.buffer) for lane in self._lanes.values()):
            for lane in self._lanes.values():
                self.offer(lane)
            await asyncio.sleep(self._linger or 0.001)
        await end_tasks(self._tasks)
        if self._subscription is not None:
            with contextlib.suppress(NatsError):
                await self._subscription.unsubscribe()

    def add(
        self,
        publisher: Publisher,
        buffer: BatchBuffer,
        on_stored: Callable[[PendingBatch], None],
        on_refused: Callable[[PendingBatch, str], None],
        on_overtaken: Callable[[EventBatch], None] = lambda stored: None,
    ) -> Lane:
        """A lane for a publisher. on_stored: a batch is safe in the stream; on_refused: it can never be stored;
        on_overtaken: another ingest has stored this batch meanwhile."""
        self._next_lane += 1
        lane = Lane(self._next_lane, publisher, buffer, on_stored, on_refused, on_overtaken)
        self._lanes[self._next_lane] = lane
        return lane

    def remove(self, lane: Lane) -> None:
        """Forget a lane; what its buffer holds is the caller's to drop."""
        self._lanes.pop(lane.number, None)
        self._due.pop(lane.number, None)
        if lane.settling is not None:
            lane.settling.cancel()

    def offer(self, lane: Lane) -> None:
        """The lane's buffer has something to send."""
        self._due[lane.number] = lane
        self._wake.set()

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._linger)
            self._wake.clear()
            due, self._due = self._due, {}
            for lane in due.values():
                if lane.sent is not None or lane.settling is not None or not len(lane.buffer):
                    continue
                if self._can_send() and time.monotonic() >= lane.not_before:
                    await self._send_head(lane)
                else:
                    self._due.setdefault(lane.number, lane)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            waiting = [lane for lane in self._lanes.values() if lane.sent is not None]
            longest = max((now - lane.sent.first_at for lane in waiting if lane.sent is not None), default=0.0)
            if longest > self._acknowledge_timeout and not self.trouble:
                self.trouble = f"NATS has not acknowledged a batch for {longest:.0f} s"
            if not self._can_send():
                continue
            if self._due:
                self._wake.set()
            for lane in waiting:
                sent = lane.sent
                if sent is not None and now - sent.at > (RETRY_SECONDS if sent.failed else self._acknowledge_timeout):
                    await self._send_again(lane, sent, now)

    def _can_send(self) -> bool:
        return self._nc.is_connected and self._nc.pending_data_size < MAX_CLIENT_BACKLOG_BYTES

    async def _send_head(self, lane: Lane) -> None:
        batch = lane.buffer.head()
        if batch is None or lane.number not in self._lanes:
            return
        body = encode(batch.body(lane.publisher))
        if len(body) > self._nc.max_payload - HEADER_BYTES:
            lane.buffer.confirm()
            lane.on_refused(batch, "too_large_for_nats")
            self.offer(lane)
            return
        now = time.monotonic()
        lane.sends += 1
        lane.sent = Sent(body, lane.sends, now, now)
        await self._publish(lane, lane.sent, batch)

    async def _send_again(self, lane: Lane, sent: Sent, now: float) -> None:
        batch = lane.buffer.head()
        if batch is None or lane.number not in self._lanes:
            return
        sent.at, sent.failed = now, False
        if now - sent.first_at > TRUST_DUPLICATE_WINDOW_SECONDS and lane.publisher.sole:
            try:
                stored = await last_stored(self._js, lane.subject)
            except (NatsError, TimeoutError):
                return
            if lane.sent is not sent:
                return
            if stored is not None and _has_passed(stored, batch, sent.body):
                self._confirm(lane)
                return
        await self._publish(lane, sent, batch)

    async def _publish(self, lane: Lane, sent: Sent, batch: PendingBatch) -> None:
        headers = {"Nats-Msg-Id": lane.message_id(batch)}
        if lane.publisher.sole and lane.newest is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(lane.newest)
        try:
            await self._nc.publish(
                lane.subject, sent.body, reply=f"{self._inbox}.{lane.number}-{sent.number}", headers=headers
            )
        except (NatsError, OSError) as error:
            self._failed(sent, f"NATS: {error}")

    async def _acknowledged(self, message: Msg) -> None:
        lane_number, _, number = message.subject.rpartition(".")[2].partition("-")
        if not (lane_number.isdecimal() and number.isdecimal()):
            return
        lane = self._lanes.get(int(lane_number))
        sent = lane.sent if lane is not None else None
        if lane is None or sent is None or sent.number != int(number):
            return
        if not message.data:
            self.no_stream.set()
            self._failed(sent, f"no JetStream stream takes {lane.subject}: is {EVENTS_STREAM} there?")
            return
        try:
            acknowledgement = _acknowledgement_decoder.decode(message.data)
        except msgspec.DecodeError as error:
            self._failed(sent, f"acknowledgement cannot be read: {error}")
            return
        if acknowledgement.error is not None and acknowledgement.error.get("err_code") == WRONG_LAST_SEQUENCE:
            lane.sent = None
            lane.settling = asyncio.create_task(self._settle(lane))
            return
        if acknowledgement.error is not None:
            self._failed(sent, f"JetStream refused a batch: {acknowledgement.error.get('description', 'no reason')}")
            return
        lane.newest = acknowledgement.seq
        self._confirm(lane)

    async def _settle(self, lane: Lane) -> None:
        """Another ingest has stored something of this publisher: learn what, and go on behind it."""
        while lane.number in self._lanes:
            try:
                lane.newest, stored = await newest_stored(self._js, lane.subject)
            except (NatsError, TimeoutError) as error:
                self.trouble = f"NATS: {error or type(error).__name__}"
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if stored is not None:
                lane.on_overtaken(stored)
            break
        lane.settling = None
        lane.not_before = 0.0 if len(lane.buffer) else time.monotonic() + STAND_BACK_SECONDS
        self.offer(lane)

    def _confirm(self, lane: Lane) -> None:
        lane.sent = None
        self.trouble = ""
        lane.on_stored(lane.buffer.confirm())
        if len(lane.buffer):
            self.offer(lane)

    def _failed(self, sent: Sent, reason: str) -> None:
        sent.failed = True
        sent.at = time.monotonic()
        self.trouble = reason
