"""The waiting state in memory: the reference for the Lua transitions, and the store of tests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from schemas.blocks import Tier, unpack_hashes
from schemas.events import Holder, Location
from services.matcher.settings import MatcherSettings
from services.matcher.state import (
    Answer,
    Applied,
    Content,
    Expired,
    FencedError,
    Forget,
    Message,
    Operation,
    Prove,
    Proved,
    Result,
    SpaceKey,
    Taught,
    Teach,
    Undo,
    Verdict,
    Waiting,
    group_key,
)

Name = tuple[Holder | None, int]


@dataclass(slots=True)
class _Space:
    epoch: int = 0
    stream: int = 0
    applied: int = 0
    outbox: dict[int, Answer] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    pending: dict[Name, dict[Waiting, int]] = field(default_factory=dict)
    content: dict[Name, tuple[Content, int]] = field(default_factory=dict)
    offload: dict[Name, tuple[Content, int]] = field(default_factory=dict)
    poor: dict[Name, tuple[Content, list[Waiting]]] = field(default_factory=dict)


class MemoryStore:
    """Implements MatcherStore for one process."""

    def __init__(self, settings: MatcherSettings) -> None:
        self._pending_ttl = round(settings.pending_ttl * 1000)
        self._content_ttl = round(settings.content_ttl * 1000)
        self._offload_ttl = round(settings.offload_ttl * 1000)
        self._max_pending = settings.max_pending
        self._spaces: dict[SpaceKey, _Space] = {}
        self._capped_pending = 0

    async def apply(self, space: SpaceKey, epoch: int, stream: int, messages: Sequence[Message], now: int) -> Applied:
        """See MatcherStore."""
        state = self._spaces.setdefault(space, _Space())
        if epoch < state.epoch:
            raise FencedError(f"epoch {epoch} is older than {state.epoch}")
        state.epoch = epoch
        if stream != state.stream:
            state.stream, state.applied, state.outbox = stream, 0, {}
        self._capped_pending = 0
        answers: dict[int, Answer | None] = {}
        ordered = [message.sequence for message in messages if message.sequence >= 0]
        outbox: dict[int, Answer] = {}
        for message in messages:
            sequence = message.sequence
            answer = state.outbox.get(sequence)
            if sequence < 0 or sequence > state.applied:
                answer = self._admit_and_run(state, message, now)
            if sequence >= 0:
                state.applied = max(state.applied, sequence)
                if answer is not None:
                    outbox[sequence] = answer
            answers[sequence] = answer
        if ordered:
            # What lies behind this call was not asked for again yet: a new leader may take smaller batches.
            later = {sequence: answer for sequence, answer in state.outbox.items() if sequence > ordered[-1]}
            state.outbox = outbox | later
        return Applied(answers, capped_pending=self._capped_pending)

    def _admit_and_run(self, state: _Space, message: Message, now: int) -> Answer:
        verdict = Verdict.ADMITTED
        if message.publisher is not None:
            publisher = group_key(message.publisher)
            current = state.generations.get(publisher, -1)
            if message.generation < max(current, message.lowest):
                return Answer((), Verdict.RETIRED)
            if message.generation > current:
                state.generations[publisher] = message.generation
                if current >= 0:
                    verdict = Verdict.RESTARTED
                    self._forget(state, Forget(message.publisher, tuple(Tier)))
        return Answer(tuple(self._run(state, operation, now) for operation in message.operations), verdict)

    async def expire(self, space: SpaceKey, epoch: int, now: int, limit: int) -> list[Expired]:
        """See MatcherStore."""
        state = self._spaces.get(space)
        if state is None:
            return []
        if epoch < state.epoch:
            raise FencedError(f"epoch {epoch} is older than {state.epoch}")
        expired: list[Expired] = []
        for name in list(state.pending):
            if len(expired) >= limit:
                break
            if max(state.pending[name].values()) <= now:
                expired.extend(Expired(name[1], waiting) for waiting in state.pending.pop(name))
        return expired

    async def publishers(self, space: SpaceKey) -> set[str]:
        """See MatcherStore."""
        return set(self._spaces.setdefault(space, _Space()).generations)

    async def forget_publishers(self, space: SpaceKey, epoch: int, groups: Collection[str]) -> None:
        """See MatcherStore."""
        state = self._spaces.setdefault(space, _Space())
        if epoch < state.epoch:
            raise FencedError(f"epoch {epoch} is older than {state.epoch}")
        for group in groups:
            state.generations.pop(group, None)

    async def spaces(self) -> list[SpaceKey]:
        """See MatcherStore."""
        return list(self._spaces)

    async def pending(self, space: SpaceKey) -> int:
        """See MatcherStore."""
        return len(self._spaces[space].pending) if space in self._spaces else 0

    def _run(self, state: _Space, operation: Operation, now: int) -> Result:
        if isinstance(operation, Teach):
            return self._teach(state, operation, now)
        if isinstance(operation, Prove):
            return self._prove(state, operation, now)
        if isinstance(operation, Undo):
            for name in _names(operation.hashes, operation.holder if operation.own else None):
                self._stop_waiting(state, name, Waiting(operation.holder, operation.tier))
                said = state.offload.get(name)
                if operation.forget_offload and said is not None and said[0].teacher == operation.holder:
                    del state.offload[name]
            return None
        self._forget(state, operation)
        return None

    def _teach(self, state: _Space, operation: Teach, now: int) -> Taught:
        names = _names(operation.hashes, operation.teacher if operation.own else None)
        contents = unpack_hashes(operation.contents)
        parent = operation.parent
        matched, corrected = [], []
        correcting, differs = operation.npu and bool(state.poor), False
        for number, (name, content_hash) in enumerate(zip(names, contents, strict=True)):
            content = Content(parent, content_hash, 0 if parent is not None else operation.root, operation.teacher)
            parent = name[1]
            family, ttl = (state.content, self._content_ttl) if operation.npu else (state.offload, self._offload_ttl)
            family[name] = (content, now + ttl)
            if correcting:
                said, deadline = state.offload.get(name, (None, 0))
                differs = differs or (said is not None and deadline > now and not same_place(said, content))
                poor = state.poor.pop(name, None)
                if poor is not None:
                    differs = differs or not same_place(poor[0], content)
                    if differs:
                        corrected.append((number, tuple(poor[1])))
            waiting = tuple(w for w, deadline in state.pending.pop(name, {}).items() if deadline > now)
            if waiting:
                matched.append((number, waiting))
                if not operation.npu:
                    _, confirmed = state.poor.setdefault(name, (content, []))
                    confirmed.extend(one for one in waiting if one not in confirmed)
        return Taught(tuple(matched), tuple(corrected))

    def _prove(self, state: _Space, operation: Prove, now: int) -> Proved:
        found: list[Content | None] = []
        waiting = Waiting(operation.holder, operation.tier)
        for name in _names(operation.hashes, operation.holder if operation.own else None):
            content = self._find(state, name, waiting, now)
            found.append(content)
            if content is None:
                self._wait(state, name, waiting, now)
        return Proved(tuple(found))

    def _find(self, state: _Space, name: Name, waiting: Waiting, now: int) -> Content | None:
        content, deadline = state.content.get(name, (None, 0))
        if content is not None and deadline > now:
            state.content[name] = (content, now + self._content_ttl)
            return content
        content, deadline = state.offload.get(name, (None, 0))
        if content is not None and deadline > now:
            state.offload[name] = (content, now + self._offload_ttl)
            _, confirmed = state.poor.setdefault(name, (content, []))
            if waiting not in confirmed:
                confirmed.append(waiting)
            return content
        return None

    def _wait(self, state: _Space, name: Name, waiting: Waiting, now: int) -> None:
        if name not in state.pending and len(state.pending) >= self._max_pending:
            oldest = min(state.pending, key=lambda block: max(state.pending[block].values()))
            del state.pending[oldest]
            self._capped_pending += 1
        state.pending.setdefault(name, {})[waiting] = now + self._pending_ttl

    def _stop_waiting(self, state: _Space, name: Name, waiting: Waiting) -> None:
        entries = state.pending.get(name)
        if entries is not None:
            entries.pop(waiting, None)
            if not entries:
                del state.pending[name]
        poor = state.poor.get(name)
        if poor is not None and waiting in poor[1]:
            poor[1].remove(waiting)
            if not poor[1]:
                del state.poor[name]

    def _forget(self, state: _Space, operation: Forget) -> None:
        for name in {*state.pending, *state.poor}:
            known = [*state.pending.get(name, ()), *(state.poor[name][1] if name in state.poor else ())]
            for waiting in known:
                if waiting.tier in operation.tiers and _covers(operation, waiting):
                    self._stop_waiting(state, name, waiting)


def _names(hashes: bytes, domain: Holder | None) -> list[Name]:
    """Engine hashes as keys: names of two workers never meet, those of pools and of the engines behind them do."""
    return [(domain, name) for name in unpack_hashes(hashes)]


def same_place(one: Content, other: Content) -> bool:
    """Whether two contents put a block at the same place of the index."""
    return (one.content_hash, one.root, one.parent) == (other.content_hash, other.root, other.parent)


def _covers(operation: Forget, waiting: Waiting) -> bool:
    holder = operation.holder
    if isinstance(holder, Location) and not holder.backend_id:
        return isinstance(waiting.holder, Location) and waiting.holder.pool_id == holder.pool_id
    return waiting.holder == holder
