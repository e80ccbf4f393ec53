"""Tells the others how each publisher's stream stands: records in ``kv_streams``, at once on a change, else repeated.

A record is published without waiting for an answer: one that is lost is replaced by the next.
"""

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from schemas.events import BodyError
from schemas.streams import StreamRecord, StreamState, dump_stream_record, load_stream_record
from schemas.subjects import STREAMS_BUCKET, stream_key
from services.ingest.subscriptions import Subscription
from services.runtime.logging import get_logger

SCAN_SECONDS = 0.2
SCAN_SHARE = 20
REPEATS_PER_TTL = 3
WORST_FIRST = (
    StreamState.STALE,
    StreamState.RECOVERING,
    StreamState.GAPPED,
    StreamState.UNKNOWN,
    StreamState.LIVE,
)

log = get_logger("ingest")

StreamKey = tuple[str, str, int]


def writer_name() -> str:
    """A name for this process, unique among the replicas of ingest."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def worst(states: Iterable[StreamState]) -> StreamState:
    """The word for a publisher with several sockets."""
    return min(states, key=WORST_FIRST.index)


@dataclass(slots=True)
class _Told:
    state: StreamState
    generation: int
    since: float
    at: float


def stream_record(sockets: Sequence[Subscription], since: float, now: float, writer: str) -> StreamRecord:
    """The record of one publisher from its sockets, primary first. now: seconds since the epoch."""
    intake = sockets[0].intake
    stream, record = intake.stream, intake.publisher.record
    state = worst(item.intake.stream.state for item in sockets)
    speaker = next(item.intake.stream for item in sockets if item.intake.stream.state is state)
    tallies = [item.intake.counts.messages for item in sockets]
    return StreamRecord(
        source=intake.publisher.key.source,
        instance_id=record.instance_id,
        dp_rank=record.dp_rank,
        model=record.model,
        tenant=record.tenant,
        state=state,
        reason=next((item.error for item in sockets if item.error), speaker.reason),
        state_since=since,
        written_at=now,
        writer=writer,
        generation=stream.lifetime.generation,
        connected=all(item.intake.stream.connected for item in sockets),
        coverage=min(item.intake.stream.coverage for item in sockets),
        first_seq=stream.first_seq,
        last_seq=stream.last_seq,
        missing=sum(item.intake.stream.missed for item in sockets),
        gaps=sum(item.intake.stream.gaps for item in sockets),
        repaired=stream.repaired,
        restarts=stream.restarts,
        last_message_at=max(item.intake.last_received_at for item in sockets) or None,
        received=sum(tally.received for tally in tallies),
        published=sum(tally.published for tally in tallies),
        rejected=sum(tally.rejected.total() for tally in tallies),
        dropped=sum(tally.dropped.total() for tally in tallies),
        pending=sum(tally.pending for tally in tallies),
    )


class StreamRecords:
    """Writes the record of every publisher. ttl: how long the bucket keeps a record that is not repeated, seconds.

    Several ingests may follow one publisher. What one of them has is in the stream, so the best state counts: who knows
    less keeps silent as long as another one says more.
    """

    def __init__(self, nc: Client, ttl: float, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        self._nc = nc
        self._ttl = ttl
        self._subscriptions = subscriptions
        self._told: dict[StreamKey, _Told] = {}
        self._others: dict[StreamKey, tuple[StreamRecord, float]] = {}
        self._writer = writer_name()
        self._listened_at = 0.0

    async def run(self) -> None:
        """Write until cancelled; with very many publishers less often, so that it never takes much of the time."""
        listening = await self._nc.subscribe(f"$KV.{STREAMS_BUCKET}.>", cb=self._hear)
        self._listened_at = time.monotonic()
        try:
            pause = SCAN_SECONDS
            while True:
                await asyncio.sleep(pause)
                began = time.monotonic()
                if self._nc.is_connected:
                    await self.write(time.time())
                pause = max(SCAN_SECONDS, SCAN_SHARE * (time.monotonic() - began))
        finally:
            with contextlib.suppress(NatsError):
                await listening.unsubscribe()

    async def write(self, now: float) -> int:
        """Publish what changed and what is due; how many records. now: seconds since the epoch."""
        sockets: dict[StreamKey, list[Subscription]] = {}
        for subscription in self._subscriptions():
            own = sockets.setdefault(subscription.publisher.key[:3], [])
            own.insert(0 if subscription.publisher.primary else len(own), subscription)
        for known in (self._told, self._others):
            for key in known.keys() - sockets.keys():
                del known[key]
        written = 0
        for key, own in sockets.items():
            state = worst(item.intake.stream.state for item in own)
            generation = own[0].intake.stream.lifetime.generation
            told = self._told.get(key)
            if told is None or (told.state, told.generation) != (state, generation):
                told = self._told[key] = self._changed(key, told, state, generation, now)
            if now - told.at < self._ttl / REPEATS_PER_TTL or self._is_outdone(key, state, generation):
                continue
            if await self._publish(key, stream_record(own, told.since, now, self._writer)):
                told.at = now
                written += 1
        return written

    def _changed(self, key: StreamKey, told: _Told | None, state: StreamState, generation: int, now: float) -> _Told:
        if told is not None:
            names = {"source": key[0], "instance_id": key[1], "dp_rank": key[2]}
            log.info("stream_state", **names, state=state, before=told.state, generation=generation)
        return _Told(state, generation, told.since if told is not None and told.state is state else now, 0.0)

    async def _hear(self, message: Msg) -> None:
        if self._writer.encode() in message.data:
            return
        with contextlib.suppress(BodyError):
            record = load_stream_record(message.data)
            key = (record.source, record.instance_id, record.dp_rank)
            if key in self._told:
                self._others[key] = (record, time.monotonic())

    def _is_outdone(self, key: StreamKey, state: StreamState, generation: int) -> bool:
        """Whether another ingest has said more of this publisher, and not long ago, or may be about to."""
        if state is not StreamState.LIVE and time.monotonic() - self._listened_at < self._ttl / REPEATS_PER_TTL:
            return True
        other, heard_at = self._others.get(key, (None, 0.0))
        if other is None or time.monotonic() - heard_at > self._ttl or other.generation < generation:
            return False
        return WORST_FIRST.index(other.state) > WORST_FIRST.index(state)

    async def _publish(self, key: StreamKey, record: StreamRecord) -> bool:
        try:
            await self._nc.publish(f"$KV.{STREAMS_BUCKET}.{stream_key(*key)}", dump_stream_record(record))
        except (NatsError, OSError):
            return False
        return True
