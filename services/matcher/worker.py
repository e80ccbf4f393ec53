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
from schemas.subjects import index_subject
from services.matcher import metrics
from services.matcher.confirmation import finish
from services.matcher.fences import Fences, holder_of_publisher
from services.matcher.reconcile import POOL_TIERS, Ask, Steps, plan
from services.matcher.reporting import Reporter
from services.matcher.state import Forget, SpaceKey
from services.matcher.store import MatcherStore
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0
MAX_BODY_BYTES = 768 * 1024
PUBLISH_TIMEOUT_SECONDS = 5.0

Answer = TypeVar("Answer")

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
        ensure_streams: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._ensure_streams = ensure_streams
        self._js = js
        self._fences = fences
        self._reporter = reporter
        self._health = health
        self._epoch = epoch
        self._stream_created = stream_created
        self._warnings = RateLimited()

    async def process(self, messages: Sequence[Incoming]) -> None:
        """Apply messages in rising order; returns when their index messages are stored, however long that takes.

        Raises FencedError when a newer leader is at work.
        """
        started = time.perf_counter()
        planned: dict[SpaceKey, list[tuple[Incoming, Steps]]] = {}
        for message in messages:
            for space, steps in self._plan(message).items():
                planned.setdefault(space, []).append((message, steps))
        for space, work in planned.items():
            groups = await self._reconcile(space, work)
            await self._publish(space, groups)
        metrics.BATCH_SECONDS.observe(time.perf_counter() - started)
        now = time.time()
        for message in messages:
            if message.batch is not None:
                metrics.DELAY_SECONDS.observe(max(0.0, now - message.batch.received_at))
        metrics.POSITION.set(messages[-1].sequence)

    async def forget(self, holders: Sequence[Holder]) -> None:
        """Stop waiting for holders that are gone from the registry (their index entries go in the router)."""
        for space in await self._store.spaces():
            forgets = [Forget(holder, POOL_TIERS) for holder in holders]
            await self._store.apply(space, self._epoch, [(-1, forgets)], _now())

    def _plan(self, message: Incoming) -> dict[SpaceKey, Steps]:
        batch = message.batch
        if batch is None:
            metrics.MESSAGES.labels("refused").inc()
            return {}
        admitted, restarted = self._fences.admit(batch)
        if not admitted:
            metrics.MESSAGES.labels("retired_generation").inc()
            self._reporter.dropped(batch, "retired_generation")
            return {}
        metrics.MESSAGES.labels("applied").inc()
        spaces = plan(batch, self._fences.remembers(batch))
        own = (batch.model, batch.tenant)
        if restarted:
            holder = holder_of_publisher(batch)
            steps = spaces.setdefault(own, Steps())
            steps.steps.insert(0, Ask(Forget(holder, POOL_TIERS)))
            steps.steps.insert(0, IndexCleared(holder, _tiers_of(batch)))
        return spaces or {own: Steps()}

    async def _reconcile(self, space: SpaceKey, work: Sequence[tuple[Incoming, Steps]]) -> list[IndexGroup]:
        asked = [(message.sequence, steps.operations()) for message, steps in work]
        if any(operations for _, operations in asked):
            apply = partial(self._store.apply, space, self._epoch, asked, _now(), self._stream_created)
            applied = await self._patiently("redis", apply, (RedisError, OSError, TimeoutError))
            results = applied.results
            metrics.CAPPED.labels("pending").inc(applied.capped_pending)
            metrics.CAPPED.labels("content").inc(applied.capped_content)
        else:
            results = {sequence: () for sequence, _ in asked}
        groups = []
        for message, steps in work:
            answers = results[message.sequence]
            if answers is None or message.batch is None:
                continue
            group, notes = finish(message.batch, message.sequence, steps, answers)
            groups.append(group)
            self._reporter.report(message.batch, space, notes)
        return groups

    async def _publish(self, space: SpaceKey, groups: Sequence[IndexGroup]) -> None:
        subject = index_subject(*space)
        for part in _parts(groups):
            body = encode(IndexBatch(WIRE_VERSION, *space, part, self._stream_created))
            first, last = part[0], part[-1]
            numbers = f"{first.source_sequence}.{first.part}-{last.source_sequence}.{last.part}"
            headers = {"Nats-Msg-Id": f"{self._stream_created}/{subject}/{numbers}/{len(body)}"}
            await self._patiently(
                "nats", partial(self._send, subject, body, headers), (NatsError, OSError, TimeoutError)
            )

    async def _send(self, subject: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            await self._js.publish(subject, body, timeout=PUBLISH_TIMEOUT_SECONDS, headers=headers)
        except NoStreamResponseError:
            # Somebody deleted the stream: make it anew, then the message is tried again.
            await self._ensure_streams()
            raise

    async def _patiently(
        self, what: str, attempt: Callable[[], Awaitable[Answer]], errors: tuple[type[Exception], ...]
    ) -> Answer:
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
