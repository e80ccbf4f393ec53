"""The waiting state in Redis: one Lua call per space and batch, on packed bytes.

Keys: ``<prefix>:matcher:{<model>|<tenant>}:...``; the hash tag puts a space into one slot of a cluster. Needs nothing
newer than Redis 6.2.
"""

import hashlib
from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote, unquote

import msgpack
import xxhash
from redis.exceptions import NoScriptError

from schemas.events import Holder, Worker
from services.matcher.settings import MatcherSettings
from services.matcher.state import (
    TIER_CODES,
    TIERS_BY_CODE,
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
    Verdict,
    Waiting,
    group_key,
    holder_key,
    holder_of,
)

MAX_CACHED_WORKERS = 65_536
DAY_MS = 24 * 3600 * 1000


class _Script:
    """One Lua script out of files in lua/, in order."""

    def __init__(self, *names: str) -> None:
        folder = resources.files(__package__).joinpath("lua")
        self.text = "\n".join(folder.joinpath(f"{name}.lua").read_text(encoding="utf-8") for name in names)
        self._sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: Any, key: str, *arguments: Any) -> Any:
        try:
            return await client.evalsha(self._sha, 1, key, *arguments)
        except NoScriptError:
            # A node that has just started does not know it; the call itself teaches it to this node.
            return await client.eval(self.text, 1, key, *arguments)


class RedisStore:
    """Implements MatcherStore. `client`: redis.asyncio Redis or RedisCluster, without decoding of responses."""

    def __init__(self, client: Any, settings: MatcherSettings) -> None:
        self._client = client
        self._prefix = f"{settings.key_prefix}:matcher:"
        self._options = msgpack.packb(
            [
                round(settings.pending_ttl * 1000),
                round(settings.content_ttl * 1000),
                round(settings.offload_ttl * 1000),
                settings.max_pending,
                settings.max_content,
            ]
        )
        self._transitions = _Script("begin", "content", "waiting", "operations")
        self._expire = _Script("expire")
        self._prune = _Script("prune")
        self._content_ttl = round(settings.content_ttl * 1000)
        self._offload_ttl = round(settings.offload_ttl * 1000)
        # Answers that were not published yet name teachers too, however long it takes until somebody does.
        self._teacher_ttl = DAY_MS + 2 * max(self._content_ttl, self._offload_ttl)
        self._worker_ids: dict[Worker, bytes] = {}
        self._teachers: dict[bytes, Worker] = {}
        self._known_spaces: set[SpaceKey] = set()

    async def apply(self, space: SpaceKey, epoch: int, stream: int, messages: Sequence[Message], now: int) -> Applied:
        """See MatcherStore. Raises redis.exceptions.RedisError when Redis is away."""
        if space not in self._known_spaces:
            await self._client.sadd(self._spaces_key, _space_name(space))
            self._known_spaces.add(space)
        packed = msgpack.packb([self._pack_message(message) for message in messages], use_bin_type=False)
        arguments = (epoch, stream, now, self._options, packed)
        answer = _unpack(await self._transitions.run(self._client, self._key(space), *arguments))
        _check_fence(answer, epoch)
        operations_of = {message.sequence: message.operations for message in messages}
        answers: dict[int, Answer | None] = {}
        for sequence, raw in answer[1]:
            answers[sequence] = None if raw is False else await self._answer(space, operations_of[sequence], *raw)
        return Applied(answers, capped_pending=answer[2], capped_content=answer[3])

    async def _answer(self, space: SpaceKey, operations: Sequence[Operation], verdict: bytes, raw: Any) -> Answer:
        if verdict == b"retired":
            return Answer((), Verdict.RETIRED)
        pairs = zip(operations, _list(raw), strict=True)
        results = tuple([await self._result(space, operation, item) for operation, item in pairs])
        return Answer(results, Verdict(verdict.decode()))

    async def expire(self, space: SpaceKey, epoch: int, now: int, limit: int) -> list[Expired]:
        """See MatcherStore."""
        arguments = (epoch, now, limit, self._content_ttl, self._offload_ttl, self._teacher_ttl)
        answer = _unpack(await self._expire.run(self._client, self._key(space), *arguments))
        _check_fence(answer, epoch)
        return [
            Expired(int.from_bytes(name[-8:], "little"), _waiting(holder, tier))
            for name, holder, tier in _list(answer[1])
        ]

    async def publishers(self, space: SpaceKey) -> set[str]:
        """See MatcherStore."""
        return {name.decode() for name in await self._client.hkeys(self._key(space) + "generations")}

    async def forget_publishers(self, space: SpaceKey, epoch: int, groups: Collection[str]) -> None:
        """See MatcherStore."""
        packed = msgpack.packb(sorted(groups))
        _check_fence(_unpack(await self._prune.run(self._client, self._key(space), epoch, packed)), epoch)

    async def spaces(self) -> list[SpaceKey]:
        """See MatcherStore."""
        return [_space_of(name.decode()) for name in await self._client.smembers(self._spaces_key)]

    async def pending(self, space: SpaceKey) -> int:
        """See MatcherStore."""
        return int(await self._client.hlen(self._key(space) + "pending"))

    @property
    def _spaces_key(self) -> str:
        return f"{self._prefix}spaces"

    def _key(self, space: SpaceKey) -> str:
        return f"{self._prefix}{{{_space_name(space)}}}:"

    def _pack_message(self, message: Message) -> list[Any]:
        publisher = "" if message.publisher is None else group_key(message.publisher)
        operations = [self._pack(operation) for operation in message.operations]
        return [message.sequence, operations, publisher, message.generation, message.lowest]

    def _worker_id(self, worker: Worker) -> bytes:
        known = self._worker_ids.get(worker)
        if known is None:
            if len(self._worker_ids) >= MAX_CACHED_WORKERS:
                self._worker_ids.clear()
                self._teachers.clear()
            known = self._worker_ids[worker] = xxhash.xxh3_64_digest(holder_key(worker).encode())
            self._teachers[known] = worker
        return known

    def _domain(self, holder: Holder, own: bool) -> bytes:
        return self._worker_id(holder) if own and isinstance(holder, Worker) else b""

    def _pack(self, operation: Operation) -> list[Any]:
        if isinstance(operation, Teach):
            return [
                "teach",
                int(operation.npu),
                operation.hashes,
                b"" if operation.parent is None else operation.parent.to_bytes(8, "little"),
                operation.contents,
                operation.root.to_bytes(8, "little"),
                self._worker_id(operation.teacher),
                holder_key(operation.teacher),
                self._domain(operation.teacher, operation.own),
            ]
        if isinstance(operation, Forget):
            return _pack_forget(operation)
        holder, tier = holder_key(operation.holder), TIER_CODES[operation.tier]
        domain = self._domain(operation.holder, operation.own)
        if isinstance(operation, Prove):
            return ["prove", operation.hashes, holder, tier, domain]
        forgetful = operation.forget_offload and isinstance(operation.holder, Worker)
        teacher = self._worker_id(operation.holder) if forgetful and isinstance(operation.holder, Worker) else b""
        return ["undo", operation.hashes, holder, tier, teacher, domain]

    async def _result(self, space: SpaceKey, operation: Operation, raw: Any) -> Result:
        if isinstance(operation, Teach):
            if raw is False:
                return Taught()
            return Taught(_holders_by_block(raw[0]), _holders_by_block(raw[1]))
        if isinstance(operation, Prove):
            return Proved(tuple([await self._content(space, record) if record else None for record in _list(raw)]))
        return None

    async def _content(self, space: SpaceKey, record: bytes) -> Content:
        teacher_id = record[25:33]
        teacher = self._teachers.get(teacher_id)
        if teacher is None:
            key = await self._client.hget(self._key(space) + "teachers", teacher_id)
            holder = holder_of(key.decode()) if key else Worker("", 0)
            teacher = holder if isinstance(holder, Worker) else Worker("", 0)
            if len(self._teachers) >= MAX_CACHED_WORKERS:
                self._worker_ids.clear()
                self._teachers.clear()
            self._teachers[teacher_id] = teacher
        return Content(
            parent=int.from_bytes(record[1:9], "little") if record[:1] == b"1" else None,
            content_hash=int.from_bytes(record[9:17], "little"),
            root=int.from_bytes(record[17:25], "little"),
            teacher=teacher,
        )


def _pack_forget(operation: Forget) -> list[Any]:
    holder = operation.holder
    whole_group = not isinstance(holder, Worker) and not holder.backend_id
    tiers = [TIER_CODES[tier] for tier in operation.tiers]
    return ["forget", group_key(holder), "" if whole_group else holder_key(holder), tiers]


def _unpack(answer: bytes) -> Any:
    return msgpack.unpackb(answer, raw=True, strict_map_key=False)


def _list(value: Any) -> list[Any]:
    """Lua cannot tell an empty list from an empty map."""
    return value if isinstance(value, list) else list(value.values())


def _check_fence(answer: Any, epoch: int) -> None:
    if answer[0] == b"fenced":
        raise FencedError(f"epoch {epoch} is older than the one that wrote last")


def _waiting(holder: bytes, tier: bytes) -> Waiting:
    return Waiting(holder_of(holder.decode()), TIERS_BY_CODE[tier.decode()])


def _holders_by_block(raw: Any) -> tuple[tuple[int, tuple[Waiting, ...]], ...]:
    return tuple((block, tuple(_waiting(*one[:2]) for one in _list(waiting))) for block, waiting in _list(raw))


def _space_name(space: SpaceKey) -> str:
    return "|".join(quote(part, safe="") for part in space)


def _space_of(name: str) -> SpaceKey:
    model, _, tenant = name.partition("|")
    return unquote(model), unquote(tenant)
