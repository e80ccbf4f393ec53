"""Carries batches of messages through the store to KV_INDEX, in order and with exactly-once effect (docs/adr/0005)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError
from redis.exceptions import RedisError

from schemas.blocks import Tier
from schemas.events import (
    WIRE_VERSION,
    EventBatch,
    Holder,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexStored,
    encode,
)
from schemas.registry import RetiredRecord
from schemas.subjects import index_subject
from services.matcher import metrics
from services.matcher.confirmation import finish
from services.matcher.fences import Fences, holder_of_publisher, holder_of_tombstone
from services.matcher.reconcile import POOL_TIERS, Steps, plan
from services.matcher.reporting import Reporter
from services.matcher.state import Applied, Forget, Message, SpaceKey, Verdict
from services.matcher.store import MatcherStore
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0
MAX_BODY_BYTES = 768 * 1024
PUBLISH_TIMEOUT_SECONDS = 5.0
MAX_SPACES = 1024
MAX_PUBLISHERS = 65_536

Response = TypeVar("Response")

log = get_logger("matcher")


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message of KV_EVENTS. batch None: it could not be read (and was put aside)."""

    sequence: int
    batch: EventBatch | None


class Matcher:
    """The working part of the active replica. epoch: of the lease under which it works."""

    def __init__(
        self,
        store: MatcherStore,
        js: JetStreamContext,
        fences: Fences,
        reporter: Reporter,
        health: Health,
        epoch: int,
        stream_created: int,
        make_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._make_streams = make_streams
        self._js = js
        self._fences = fences
        self._reporter = reporter
        self._health = health
        self._epoch = epoch
        self._stream_created = stream_created
        self._warnings = RateLimited()
        self._in_order = asyncio.Lock()
        self._spaces: set[SpaceKey] | None = None
        self._generations: dict[Holder, int] = {}

    async def process(self, messages: Sequence[Incoming]) -> None:
        """Apply messages in rising order; returns when their index messages are stored, however long that takes.

        Raises FencedError when a newer leader is at work.
        """
        async with self._in_order:
            started = time.perf_counter()
            await self._learn_spaces()
            outcomes: dict[int, bool] = {}
            planned: dict[SpaceKey, list[tuple[Incoming, Steps]]] = {}
            for message in messages:
                for space, steps in self._plan(message).items():
                    planned.setdefault(space, []).append((message, steps))
            for space, work in planned.items():
                groups = await self._reconcile(space, work, outcomes)
                await self._publish(space, groups)
        metrics.BATCH_SECONDS.observe(time.perf_counter() - started)
        now = time.time()
        for message in messages:
            if message.batch is not None:
                self._tally(message.batch, outcomes.get(message.sequence))
                metrics.DELAY_SECONDS.observe(max(0.0, now - message.batch.received_at))
        metrics.POSITION.set(messages[-1].sequence)

    async def forget(self, tombstones: Sequence[RetiredRecord]) -> None:
        """Take away what publishers hold that are gone from the registry, in every space; harmless when repeated.

        In order with `process`, so that nothing confirmed before stays in the index.
        """
        async with self._in_order:
            await self._learn_spaces()
            for space in sorted(self._spaces or ()):
                forgets = tuple(Forget(holder_of_tombstone(record), tuple(Tier)) for record in tombstones)
                apply = partial(self._apply, space, [Message(-1, forgets)])
                await self._patiently("redis", apply, (RedisError, OSError, TimeoutError))
                await self._publish(space, [_group_of_tombstone(record) for record in tombstones])

    def _plan(self, message: Incoming) -> dict[SpaceKey, Steps]:
        batch = message.batch
        if batch is None:
            metrics.MESSAGES.labels("refused").inc()
            return {}
        spaces = {space: steps for space, steps in plan(batch).items() if self._may_open(space, steps, batch)}
        own = (batch.model, batch.tenant)
        if not spaces and self._may_open(own, Steps(), batch):
            spaces[own] = Steps()
        publisher = holder_of_publisher(batch)
        if batch.source == "pool" and self._generations.get(publisher) != batch.generation:
            # A pool may serve several spaces: its new life ends the old one in all of them, not only in this message's.
            self._remember_generation(publisher, batch.generation)
            for space in self._spaces or ():
                spaces.setdefault(space, Steps())
        return spaces

    def _remember_generation(self, publisher: Holder, generation: int) -> None:
        if len(self._generations) >= MAX_PUBLISHERS:
            self._generations.clear()
        self._generations[publisher] = generation

    def _may_open(self, space: SpaceKey, steps: Steps, batch: EventBatch) -> bool:
        spaces = self._spaces if self._spaces is not None else set()
        if space in spaces:
            return True
        if len(spaces) >= MAX_SPACES and not self._fences.is_configured(space):
            self._reporter.dropped(batch, "too_many_spaces", max(1, len(steps.steps)))
            return False
        spaces.add(space)
        return True

    async def _learn_spaces(self) -> None:
        if self._spaces is None:
            known = await self._patiently("redis", self._store.spaces, (RedisError, OSError, TimeoutError))
            self._spaces = {*known, *self._fences.spaces}

    async def _apply(self, space: SpaceKey, messages: Sequence[Message]) -> Applied:
        return await self._store.apply(space, self._epoch, self._stream_created, messages, _now())

    async def _reconcile(
        self, space: SpaceKey, work: Sequence[tuple[Incoming, Steps]], outcomes: dict[int, bool]
    ) -> list[IndexGroup]:
        # Also without operations: nothing is published that did not pass the fence of the lease and of generations.
        asked = [self._message(message.sequence, message.batch, steps) for message, steps in work if message.batch]
        apply = partial(self._apply, space, asked)
        applied = await self._patiently("redis", apply, (RedisError, OSError, TimeoutError))
        metrics.CAPPED.labels("pending").inc(applied.capped_pending)
        metrics.CAPPED.labels("content").inc(applied.capped_content)
        groups = []
        for message, steps in work:
            answer, batch = applied.answers[message.sequence], message.batch
            if answer is None or batch is None:
                continue
            outcomes[message.sequence] = outcomes.get(message.sequence, False) or answer.verdict is not Verdict.RETIRED
            if answer.verdict is Verdict.RETIRED:
                continue
            group, notes = finish(batch, message.sequence, steps, answer.results)
            if answer.verdict is Verdict.RESTARTED:
                group.events.insert(0, IndexCleared(holder_of_publisher(batch), _tiers_of(batch)))
            elif not group.events and space != (batch.model, batch.tenant):
                continue
            groups.append(group)
            self._reporter.report(batch, space, notes)
        return groups

    def _message(self, sequence: int, batch: EventBatch, steps: Steps) -> Message:
        lowest = self._fences.lowest(batch)
        return Message(sequence, steps.operations(), holder_of_publisher(batch), batch.generation, lowest)

    def _tally(self, batch: EventBatch, admitted: bool | None) -> None:
        outcome = "repeated" if admitted is None else "applied" if admitted else "retired_generation"
        if admitted is False:
            self._reporter.dropped(batch, outcome, max(1, len(batch.events)))
        metrics.MESSAGES.labels(outcome).inc()
        if self._fences.is_registered(batch):
            names = (batch.source, batch.instance_id, str(batch.dp_rank), outcome)
            metrics.PUBLISHER_EVENTS.labels(*names).inc(len(batch.events))

    async def _publish(self, space: SpaceKey, groups: Sequence[IndexGroup]) -> None:
        subject = index_subject(*space)
        for part in _parts(groups):
            body = encode(IndexBatch(WIRE_VERSION, *space, part, self._stream_created))
            first, last = part[0], part[-1]
            numbers = f"{first.source_sequence}.{first.part}-{last.source_sequence}.{last.part}"
            headers = {"Nats-Msg-Id": f"{self._stream_created}/{subject}/{numbers}/{len(body)}"}
            send = partial(self._send, subject, body, headers)
            await self._patiently("nats", send, (NatsError, OSError, TimeoutError))

    async def _send(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            await self._js.publish(subject, body, timeout=PUBLISH_TIMEOUT_SECONDS, headers=headers)
        except NoStreamResponseError:
            # Somebody deleted the stream: make it anew, then the message is tried again.
            await self._make_streams()
            raise

    async def _patiently(
        self, what: str, attempt: Callable[[], Awaitable[Response]], errors: tuple[type[Exception], ...]
    ) -> Response:
        """Repeat until it works; everything behind waits, and readiness says for what."""
        wait = FIRST_WAIT_SECONDS
        while True:
            try:
                answer = await attempt()
            except errors as error:
                text = str(error) or type(error).__name__
                self._health.set(what, False, f"{what} does not answer, batch is kept: {text}")
                held_back = self._warnings.allow(what)
                if held_back is not None:
                    log.warning("waiting", on=what, error=text, held_back=held_back)
                await asyncio.sleep(wait)
                wait = min(LONGEST_WAIT_SECONDS, wait * 2)
            else:
                if self._health.set(what, True) and wait > FIRST_WAIT_SECONDS:
                    log.info("answers_again", what=what)
                return answer


def _group_of_tombstone(record: RetiredRecord) -> IndexGroup:
    # One above the last life: the router admits it although that life is over, and no later one begins below it.
    return IndexGroup(
        source_sequence=0,
        source=record.retired_kind,
        instance_id=record.instance_id,
        dp_rank=record.dp_rank,
        generation=record.generation + 1,
        first_seq=0,
        last_seq=0,
        received_at=time.time(),
        events=[IndexCleared(holder_of_tombstone(record), tuple(Tier))],
    )


def _tiers_of(batch: EventBatch) -> tuple[Tier, ...]:
    return (Tier.NPU, *batch.own_tiers) if batch.source == "engine" else POOL_TIERS


def _parts(groups: Sequence[IndexGroup]) -> list[list[IndexGroup]]:
    """Groups in runs that fit one NATS message each; a group that is too large is cut between its events."""
    parts: list[list[IndexGroup]] = [[]]
    size = 0
    for group in groups:
        for number, events in enumerate(_cut(group.events)):
            own = 128 + sum(map(_size, events))
            if parts[-1] and size + own > MAX_BODY_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(msgspec.structs.replace(group, events=events, part=number))
            size += own
    return [part for part in parts if part]


def _cut(events: list[IndexEvent]) -> list[list[IndexEvent]]:
    runs: list[list[IndexEvent]] = [[]]
    size = 0
    for event in events:
        if runs[-1] and size + _size(event) > MAX_BODY_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(event)
        size += _size(event)
    return runs


def _size(event: IndexEvent) -> int:
    hashes = 0 if isinstance(event, IndexCleared) else len(event.engine_hashes)
    return 160 + hashes + (len(event.content_hashes) if isinstance(event, IndexStored) else 0)


def _now() -> int:
    return int(time.time() * 1000)
