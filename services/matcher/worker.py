"""Carries batches of messages through the store to KV_INDEX, in order and with exactly-once effect (docs/adr/0005)."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError
from redis.exceptions import RedisError, ResponseError

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
from services.matcher.reconcile import MALFORMED, POOL_TIERS, Steps, plan
from services.matcher.reporting import Reporter
from services.matcher.state import Applied, Forget, Message, SpaceKey, Verdict
from services.matcher.store import MatcherStore
from services.runtime.accounts import OTHERS, Account, Accounts, PublisherKey
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0
MAX_BODY_BYTES = 768 * 1024
PUBLISH_TIMEOUT_SECONDS = 5.0
MAX_SPACES = 1024
MAX_PUBLISHERS = 65_536
MAX_REFUSALS = 3
# Answers that say something of Redis, not of what it was asked.
PASSING_ANSWERS = (
    *("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MOVED", "ASK", "BUSY", "OOM"),
    *("MISCONF", "NOAUTH", "NOPERM", "WRONGPASS", "NOSCRIPT", "EXECABORT", "UNBLOCKED", "DENIED"),
)
APPLIED, REPEATED, RETIRED = "applied", "repeated", "retired_generation"
FAILED, UNREGISTERED, UNREADABLE, TOO_MANY_SPACES = "failed", "unregistered", "unreadable", "too_many_spaces"

Response = TypeVar("Response")

log = get_logger("matcher")


class RefusedByStoreError(Exception):
    """Redis is there, but a message makes its script fail."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message of KV_EVENTS. batch None: it could not be read (and was put aside).

    publisher: whose it is. known: whether the registry knows the publisher; nothing of a stranger is applied.
    """

    sequence: int
    batch: EventBatch | None
    publisher: PublisherKey = OTHERS
    known: bool = True

    @property
    def events(self) -> int:
        """How many events it counts for; a message that cannot be read is one."""
        return len(self.batch.events) if self.batch is not None else 1


@dataclass(slots=True)
class _Outcome:
    """admitted: None when the store had applied the message before. without_effect: events by reason."""

    admitted: bool | None = None
    without_effect: Counter[str] = field(default_factory=Counter)


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
        accounts: Accounts,
    ) -> None:
        self._store = store
        self._accounts = accounts
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
            accounts = [self._accounts.of(message.publisher) for message in messages]
            for message, account in zip(messages, accounts, strict=True):
                account.received += message.events
            try:
                outcomes = await self._process(messages)
            except BaseException:
                for message, account in zip(messages, accounts, strict=True):
                    account.returned += message.events
                raise
            for message, account in zip(messages, accounts, strict=True):
                self._tally(message, account, outcomes[message.sequence])
            self._say_lost(self._accounts.check_now_and_then())
        metrics.POSITION.set(messages[-1].sequence)

    async def _process(self, messages: Sequence[Incoming]) -> dict[int, _Outcome]:
        started = time.perf_counter()
        await self._learn_spaces()
        outcomes = {message.sequence: _Outcome() for message in messages}
        planned: dict[SpaceKey, list[tuple[Incoming, Steps]]] = {}
        for message in messages:
            for space, steps in self._plan(message, outcomes[message.sequence]).items():
                planned.setdefault(space, []).append((message, steps))
        for space, work in planned.items():
            groups = await self._reconcile(space, work, outcomes)
            await self._publish(space, groups)
        metrics.BATCH_SECONDS.observe(time.perf_counter() - started)
        return outcomes

    def give_up(self, message: Incoming) -> None:
        """Book a message that cannot be processed; it has been put aside."""
        metrics.MESSAGES.labels(FAILED).inc()
        account = self._accounts.of(message.publisher)
        account.received += message.events
        account.reject(FAILED, message.events)

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

    def _plan(self, message: Incoming, outcome: _Outcome) -> dict[SpaceKey, Steps]:
        batch = message.batch
        if batch is None or not message.known:
            return {}
        spaces = {}
        for space, steps in plan(batch).items():
            if self._may_open(space, steps, batch):
                spaces[space] = steps
                outcome.without_effect.update(steps.dropped)
            else:
                outcome.without_effect[TOO_MANY_SPACES] += steps.events
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
            self._reporter.dropped(batch, TOO_MANY_SPACES, max(1, steps.events))
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
        self, space: SpaceKey, work: Sequence[tuple[Incoming, Steps]], outcomes: dict[int, _Outcome]
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
            outcome = outcomes[message.sequence]
            outcome.admitted = bool(outcome.admitted) or answer.verdict is not Verdict.RETIRED
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

    def _tally(self, message: Incoming, account: Account, outcome: _Outcome) -> None:
        """Book every event of a message that is done."""
        batch = message.batch
        if batch is None:
            metrics.MESSAGES.labels("refused").inc()
            account.reject(UNREADABLE)
            return
        metrics.DELAY_SECONDS.observe(max(0.0, time.time() - batch.received_at))
        word = _word(message, outcome)
        metrics.MESSAGES.labels(word).inc()
        if word != APPLIED:
            account.drop(word, message.events)
            if word != REPEATED:
                self._reporter.dropped(batch, word, max(1, message.events))
            return
        for reason, events in outcome.without_effect.items():
            (account.reject if reason == MALFORMED else account.drop)(reason, events)
        account.applied += message.events - outcome.without_effect.total()

    def _say_lost(self, lost: dict[PublisherKey, int]) -> None:
        for publisher, events in lost.items():
            log.error("events_lost", publisher=publisher, events=events)

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
        """Repeat until it works; everything behind waits, and readiness says for what.

        Raises RefusedByStoreError for what Redis does not take however often it is asked.
        """
        wait, refusals = FIRST_WAIT_SECONDS, 0
        while True:
            try:
                answer = await attempt()
            except errors as error:
                refusals += _is_refusal(error)
                if refusals >= MAX_REFUSALS:
                    raise RefusedByStoreError(f"Redis refuses the batch: {error}") from error
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


def _is_refusal(error: Exception) -> bool:
    """Whether this is Redis' answer to this very question, which will be the same the next time."""
    text = str(error).upper()
    return type(error) is ResponseError and not any(text.startswith(word) for word in PASSING_ANSWERS)


def _word(message: Incoming, outcome: _Outcome) -> str:
    if not message.known:
        return UNREGISTERED
    if outcome.admitted is None:
        return REPEATED
    return APPLIED if outcome.admitted else RETIRED


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
