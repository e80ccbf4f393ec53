"""How far what is known of a publisher may be believed: its state word, freshness, and whether its blocks are offered.

Pure. Three sources agree here: what ingest says of the stream (kv_streams), what health checks say of the engine
(kv_liveness), and how well this router itself follows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.liveness import Liveness, LivenessState
from schemas.registry import EngineRecord, PoolRecord
from schemas.streams import StreamRecord, StreamState
from services.router.publishers import Publisher, PublisherKey, Publishers
from services.runtime.registry_store import Registry

UNCHECKED = "unknown"


class Following(StrEnum):
    """How this router follows the index stream: up to date, still reading what was there, or cut off from NATS."""

    CURRENT = "current"
    CATCHING_UP = "catching_up"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True)
class Heard:
    """A stream's record. silence: seconds since ingest last said anything of it, as far as this router could hear."""

    record: StreamRecord | None
    silence: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What answers say of a publisher. coverage: None while unknown. last_message_at: seconds since the epoch.

    hidden: its blocks are not offered, because nobody knows whether it still has them. dead: nothing at all may be
    sent to it (an engine).
    """

    state: StreamState
    reason: str
    generation: int
    last_seq: int | None
    last_message_at: float | None
    coverage: float | None
    health: str = UNCHECKED
    hidden: bool = False
    dead: bool = False

    @property
    def offered(self) -> bool:
        """Whether its blocks are offered."""
        return not (self.hidden or self.dead)

    def answer(self, now: float) -> dict[str, Any]:
        """The form in /query and /workers. now: seconds since the epoch."""
        age = None if self.last_message_at is None else round(max(0.0, now - self.last_message_at), 1)
        return {
            "state": str(self.state),
            "reason": self.reason or None,
            "generation": self.generation,
            "last_seq": self.last_seq,
            "age": age,
            "coverage": None if self.coverage is None else round(self.coverage, 6),
            "health": self.health,
            "offered": self.offered,
        }


NOTHING_KNOWN = Standing(StreamState.UNKNOWN, "not looked at yet", 0, None, None, None)


def standing_of(
    record: EngineRecord | PoolRecord,
    publisher: Publisher,
    heard: Heard,
    liveness: Liveness | None,
    following: Following,
    stale_after: float,
    incomplete_before: int,
    before: Standing | None,
) -> Standing:
    """One publisher's standing. before: the last one. stale_after: seconds after which a stale one is not offered.

    A publisher that was hidden because it was stale stays hidden until it is heard again: it may have lost its cache
    while nobody listened.
    """
    stream = heard.record
    if stream is not None and stream.generation < record.generation:
        stream = None
    state, reason, stale_for = _word(record, stream, heard.silence, stale_after)
    generation = max(publisher.generation, record.generation)
    hidden = state is StreamState.STALE and stale_for >= stale_after
    was_hidden = before is not None and before.hidden and before.generation == generation
    if state is StreamState.UNKNOWN and was_hidden:
        hidden, reason = True, "nothing heard since the connection came back"
    if state is StreamState.LIVE and generation < incomplete_before:
        state, reason = StreamState.GAPPED, "the index stream had dropped a part of its history"
    if following is Following.DISCONNECTED:
        # What ingest says cannot be heard. That is no reason to forget what was known.
        hidden = was_hidden
        state, reason = StreamState.STALE, "this router has lost NATS; it answers from what it knew"
    elif following is Following.CATCHING_UP and state in (StreamState.LIVE, StreamState.UNKNOWN):
        state, reason = StreamState.RECOVERING, "this router is catching up with the index stream"
    dead = liveness is not None and liveness.state is LivenessState.DEAD
    if dead and liveness is not None:
        reason = f"health check: {liveness.reason}"
    last = stream.last_message_at if stream is not None else None
    return Standing(
        state=state,
        reason=reason,
        generation=generation,
        last_seq=publisher.last_seq if publisher.last_seq >= 0 else None,
        last_message_at=last if last is not None else publisher.last_event_at or None,
        coverage=stream.coverage if stream is not None else None,
        health=str(liveness.state) if liveness is not None else UNCHECKED,
        hidden=hidden,
        dead=dead,
    )


def _word(
    record: EngineRecord | PoolRecord, stream: StreamRecord | None, silence: float, stale_after: float
) -> tuple[StreamState, str, float]:
    """State, reason and, for a stale stream, for how long it has been so."""
    if isinstance(record, EngineRecord) and not record.endpoints:
        return StreamState.UNKNOWN, "no event publisher is registered", 0.0
    if stream is None:
        if silence < stale_after:
            return StreamState.UNKNOWN, "ingest has not said anything yet", 0.0
        return StreamState.STALE, "no ingest listens to it", silence
    if silence >= stale_after:
        return StreamState.STALE, f"ingest has said nothing for {silence:.0f} s", silence
    if stream.state is StreamState.STALE:
        return stream.state, stream.reason, stream.written_at - stream.state_since + silence
    return stream.state, stream.reason, 0.0


class Standings:
    """The standing of every registered publisher, made anew from time to time.

    stale_after: seconds after which the blocks of a stale publisher are not offered. version: counts the times that
    they were made anew.
    """

    def __init__(self, stale_after: float) -> None:
        self._stale_after = stale_after
        self._answers: dict[PublisherKey, dict[str, Any]] = {}
        self._known: dict[PublisherKey, Standing] = {}
        self._pools: dict[str, Standing] = {}
        self.following = Following.CURRENT
        self.version = 0

    def update(
        self,
        registry: Registry,
        publishers: Publishers,
        heard: Callable[[PublisherKey], Heard],
        liveness: Callable[[str, int], Liveness | None],
        following: Following,
        incomplete_before: int,
        now: float,
    ) -> bool:
        """Make all standings anew; whether what is offered has changed. now: seconds since the epoch."""
        self.following = following
        fresh: dict[PublisherKey, Standing] = {}
        for key, record in _records(registry):
            fresh[key] = standing_of(
                record,
                publishers.get(key),
                heard(key),
                liveness(record.instance_id, record.dp_rank) if isinstance(record, EngineRecord) else None,
                following,
                self._stale_after,
                incomplete_before,
                self._known.get(key),
            )
        changed = _hidden(fresh) != _hidden(self._known)
        self._known = fresh
        self._pools = {pool_id: standing for (source, pool_id, _), standing in fresh.items() if source == "pool"}
        self._answers = {key: standing.answer(now) for key, standing in fresh.items()}
        self.version += 1
        return changed

    def of_engine(self, instance_id: str, dp_rank: int) -> Standing:
        """An engine rank's standing."""
        return self._known.get(("engine", instance_id, dp_rank), NOTHING_KNOWN)

    def of_pool(self, pool_id: str) -> Standing:
        """A pool's standing."""
        return self._pools.get(pool_id, NOTHING_KNOWN)

    def answer(self, source: str, instance_id: str, dp_rank: int) -> dict[str, Any]:
        """A standing as answers carry it, as old as the last `update`. Not to be changed."""
        return self._answers.get((source, instance_id, dp_rank)) or NOTHING_KNOWN.answer(0.0)

    def all(self) -> dict[PublisherKey, Standing]:
        """Every registered publisher's standing."""
        return self._known


def _records(registry: Registry) -> Iterator[tuple[PublisherKey, EngineRecord | PoolRecord]]:
    for (instance_id, dp_rank), engine in registry.engines.items():
        yield ("engine", instance_id, dp_rank), engine
    for pool_id, pool in registry.pools.items():
        yield ("pool", pool_id, pool.dp_rank), pool


def _hidden(standings: dict[PublisherKey, Standing]) -> set[tuple[PublisherKey, bool]]:
    return {(key, standing.dead) for key, standing in standings.items() if not standing.offered}
