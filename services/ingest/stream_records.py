"""Tells the others how each publisher's stream stands: records in ``kv_streams``, at once on a change, else repeated.

A record is published without waiting for an answer: one that is lost is replaced by the next.
"""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nats.aio.client import Client
from nats.errors import Error as NatsError

from schemas.streams import StreamRecord, StreamState, dump_stream_record
from schemas.subjects import STREAMS_BUCKET, stream_key
from services.ingest.subscriptions import Subscription
from services.runtime.logging import get_logger

SCAN_SECONDS = 0.2
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
    """Writes the record of every publisher. ttl: how long the bucket keeps a record that is not repeated, seconds."""

    def __init__(self, nc: Client, ttl: float, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        self._nc = nc
        self._repeat = ttl / REPEATS_PER_TTL
        self._subscriptions = subscriptions
        self._told: dict[StreamKey, _Told] = {}
        self._writer = writer_name()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            if self._nc.is_connected:
                await self.write(time.time())

    async def write(self, now: float) -> int:
        """Publish what changed and what is due; how many records. now: seconds since the epoch."""
        sockets: dict[StreamKey, list[Subscription]] = {}
        for subscription in self._subscriptions():
            own = sockets.setdefault(subscription.publisher.key[:3], [])
            own.insert(0 if subscription.publisher.primary else len(own), subscription)
        for key in self._told.keys() - sockets.keys():
            del self._told[key]
        written = 0
        for key, own in sockets.items():
            state = worst(item.intake.stream.state for item in own)
            generation = own[0].intake.stream.lifetime.generation
            told = self._told.get(key)
            if told is None or (told.state, told.generation) != (state, generation):
                since = told.since if told is not None and told.state is state else now
                told = self._told[key] = _Told(state, generation, since, 0.0)
                log.info(
                    "stream_state",
                    source=key[0],
                    instance_id=key[1],
                    dp_rank=key[2],
                    state=state,
                    generation=generation,
                )
            if now - told.at >= self._repeat and await self._publish(
                key, stream_record(own, told.since, now, self._writer)
            ):
                told.at = now
                written += 1
        return written

    async def _publish(self, key: StreamKey, record: StreamRecord) -> bool:
        try:
            await self._nc.publish(f"$KV.{STREAMS_BUCKET}.{stream_key(*key)}", dump_stream_record(record))
        except (NatsError, OSError):
            return False
        return True
