"""Registrations into the registry: generations, compare-and-set, tombstones (docs/adr/0003).

Every process that takes registrations (router, coordinator) has one; several may write at the same time. A key is only
ever replaced at the revision that was read, so no write is lost and generations of a publisher strictly rise.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from nats.errors import Error as NatsError
from nats.js.errors import APIError, KeyWrongLastSequenceError

from schemas.registration import (
    FieldProblem,
    Registration,
    RegistrationError,
    Unregistration,
    parse_registration,
    parse_unregistration,
)
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord, dump_record
from schemas.subjects import engine_key, pool_key
from services.runtime.logging import get_logger
from services.runtime.registration_answers import Answer, conflict, not_found, refused, unreachable
from services.runtime.registration_rules import (
    EndpointTakenError,
    KindTakenError,
    LaterLifeError,
    LiveRecord,
    check_free,
    kept,
    knows,
    next_generation,
    rivals,
    same_registration,
)
from services.runtime.registry_store import AnyRecord, Registry, RegistryStore, RegistryWatch, key_of

ATTEMPTS = 8
READ_BACK_SECONDS = 3.0
REQUEST_SECONDS = 10.0
RETRY_SECONDS = 0.01

log = get_logger("registrar")


class Registrar:
    """Carries out registrations. `watch` must have been started; `pool_service`: what a pool's wildcard stands for."""

    def __init__(
        self,
        store: RegistryStore,
        watch: RegistryWatch,
        pool_service: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._watch = watch
        self._pool_service = pool_service
        self._clock = clock
        self._lock = asyncio.Lock()

    async def register(self, body: object) -> Answer:
        """``POST /register``: 201 also for a repetition; 409 taken, 422 refused with every field, 503 no registry."""
        try:
            registration = parse_registration(body, self._pool_service)
        except RegistrationError as error:
            return refused(error.problems)
        for warning in registration.warnings:
            log.warning("registration_warning", instance_id=registration.record.instance_id, warning=warning)
        return await self.register_parsed(registration)

    async def register_parsed(self, registration: Registration) -> Answer:
        """The same for a body that was read already."""
        record = registration.record
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self.put(record)
        except EndpointTakenError as error:
            fix = f"give each instance its own, or unregister {error.owner} first"
            return conflict("endpoint_taken", FieldProblem("endpoint", str(error), fix))
        except KindTakenError as error:
            return conflict("kind_taken", FieldProblem("instance_id", str(error), "use another id, or unregister it"))
        except (NatsError, TimeoutError) as error:
            return unreachable(error)
        if record.registered_with == "mooncake":
            return Answer(201, {"status": "registered successfully", "instance_id": record.instance_id})
        return Answer(201, {"status": "ok"})

    async def unregister(self, body: object) -> Answer:
        """``POST /unregister``: 200, 404 for an unknown instance, 422, 503. An unknown rank of a known one is 200."""
        try:
            request = parse_unregistration(body)
        except RegistrationError as error:
            return refused(error.problems)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                known, removed = await self._unregister(request)
        except LaterLifeError as error:
            fix = "leave the present life alone, or unregister it without a generation"
            return conflict("later_life", FieldProblem("generation", str(error), fix))
        except (NatsError, TimeoutError) as error:
            return unreachable(error)
        if not known:
            return not_found(request.instance_id)
        if any(record.registered_with == "mooncake" for record in removed):
            names = [f"{record.instance_id}|{record.tenant}|{record.dp_rank}" for record in removed]
            return Answer(200, {"status": "unregistered successfully", "removed_instances": names})
        return Answer(200, {"status": "ok"})

    async def unregister_instance(self, instance_id: str) -> Answer:
        """``DELETE /instances/{id}``: every rank of an engine, or the pool of that name; 404 for an unknown one."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                removed = await self.remove(instance_id)
        except (NatsError, TimeoutError) as error:
            return unreachable(error)
        return Answer(200, {"status": "ok", "removed": len(removed)}) if removed else not_found(instance_id)

    async def put(self, record: LiveRecord) -> bool:
        """Write a record unless the very same is there; whether it was written.

        Raises EndpointTakenError, KindTakenError, nats.errors.Error, TimeoutError.
        """
        async with self._lock:
            if rivals(record, self._watch.registry):
                check_free(record, await self.fresh_view())
            key = key_of(record)
            for attempt in range(ATTEMPTS):
                await asyncio.sleep(attempt * RETRY_SECONDS)
                current, revision = await self._store.get(key)
                if isinstance(current, EngineRecord | PoolRecord) and same_registration(current, record):
                    renamed = kept(current, record)
                    if renamed is None or await self._replace(key, renamed, revision) is not None:
                        return False
                    continue
                generation = next_generation(current, self._clock())
                fresh = record.model_copy(update={"generation": generation})
                written = await self._replace(key, fresh, revision)
                if written is None:
                    continue
                await self._yield_to_earlier(fresh, written, current)
                log.info(
                    "registered" if not isinstance(current, EngineRecord | PoolRecord) else "registration_changed",
                    kind=record.kind,
                    instance_id=record.instance_id,
                    dp_rank=record.dp_rank,
                    model=record.model,
                    generation=generation,
                )
                return True
        raise TimeoutError(f"registry key {key} is written by too many at once")

    async def remove(
        self, instance_id: str, dp_ranks: Iterable[int] | None = None, generation: int = 0
    ) -> list[LiveRecord]:
        """Retire an instance's ranks (all of them by default) or the pool of that name; what was removed.

        generation: the life that is meant, 0 for whichever stands. Raises LaterLifeError, nats.errors.Error,
        TimeoutError.
        """
        removed = []
        async with self._lock:
            if dp_ranks is None:
                registry = await self.fresh_view()
                ranks = sorted(rank for instance, rank in registry.engines if instance == instance_id)
            else:
                ranks = sorted(set(dp_ranks))
            for key in [*(engine_key(instance_id, rank) for rank in ranks), pool_key(instance_id)]:
                record = await self._retire(key, generation)
                if record is not None:
                    removed.append(record)
        return removed

    async def set_paused(self, instance_id: str, paused: bool) -> int:
        """Mark an instance's ranks as taking no new requests, or take the mark away; how many changed.

        Generations stay, so nothing that the instance holds is forgotten. Raises nats.errors.Error, TimeoutError.
        """
        changed = 0
        async with self._lock:
            ranks = [rank for instance, rank in (await self.fresh_view()).engines if instance == instance_id]
            for key in (engine_key(instance_id, rank) for rank in ranks):
                current, revision = await self._store.get(key)
                if isinstance(current, EngineRecord) and current.paused != paused:
                    written = await self._replace(key, current.model_copy(update={"paused": paused}), revision)
                    changed += written is not None
        return changed

    async def sweep(self, older_than: float) -> int:
        """Remove tombstones older than this many seconds; how many. Raises nats.errors.Error, TimeoutError.

        Older than the streams keep events, a tombstone has nothing left to discard.
        """
        oldest = int((self._clock() - older_than) * 1000)
        swept = 0
        for tombstone in self._watch.registry.retired:
            if tombstone.generation >= oldest:
                continue
            key = key_of(tombstone)
            async with self._lock:
                current, revision = await self._store.get(key)
                if isinstance(current, RetiredRecord) and current.generation < oldest:
                    swept += await self._delete(key, revision)
        if swept:
            log.info("tombstones_removed", tombstones=swept)
        return swept

    async def _unregister(self, request: Unregistration) -> tuple[bool, list[LiveRecord]]:
        removed = await self.remove(request.instance_id, [request.dp_rank], request.generation)
        for record in removed:
            if request.model and request.model != record.model:
                log.warning(
                    "unregistered_another_model", instance_id=record.instance_id, asked=request.model, had=record.model
                )
        return bool(removed) or knows(await self.fresh_view(), request.instance_id), removed

    async def fresh_view(self) -> Registry:
        """The registry with every write that was finished before now."""
        status = await (await self._store.bucket()).status()
        await self._watch.wait_for_revision(status.stream_info.state.last_seq, READ_BACK_SECONDS)
        return self._watch.registry

    async def _retire(self, key: str, generation: int = 0) -> LiveRecord | None:
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(attempt * RETRY_SECONDS)
            current, revision = await self._store.get(key)
            if not isinstance(current, EngineRecord | PoolRecord):
                return None
            if generation and generation < current.generation:
                raise LaterLifeError(current.instance_id, current.generation)
            tombstone = RetiredRecord(
                retired_kind=current.kind,
                instance_id=current.instance_id,
                dp_rank=current.dp_rank,
                model=current.model,
                tenant=current.tenant,
                generation=next_generation(current, self._clock()),
            )
            if await self._replace(key, tombstone, revision) is not None:
                log.info(
                    "unregistered", kind=current.kind, instance_id=current.instance_id, dp_rank=current.dp_rank,
                    model=current.model, generation=tombstone.generation,
                )  # fmt: skip
                return current
        raise TimeoutError(f"registry key {key} is written by too many at once")

    async def _replace(self, key: str, record: AnyRecord, revision: int) -> int | None:
        """Write at a revision (0: no key); the new revision, None when somebody was faster.

        Returns when this process sees its own write, so an answer to a client is never ahead of the index.
        """
        bucket = await self._store.bucket()
        body = dump_record(record)
        try:
            written = await (bucket.update(key, body, last=revision) if revision else bucket.create(key, body))
        except KeyWrongLastSequenceError:
            return None
        await self._watch.wait_for_revision(written, READ_BACK_SECONDS)
        return written

    async def _delete(self, key: str, revision: int) -> bool:
        bucket = await self._store.bucket()
        try:
            await bucket.delete(key, last=revision)
        except APIError:
            return False
        return True

    async def _yield_to_earlier(self, record: LiveRecord, revision: int, before: AnyRecord | None) -> None:
        """Take a record back when another process has registered the same publisher at an earlier revision.

        The bucket's revisions are one order that all writers see, so of two exactly the later one yields.
        """
        try:
            check_free(record, self._watch.registry)
        except (EndpointTakenError, KindTakenError) as error:
            for rival in rivals(record, self._watch.registry):
                rival_record, rival_revision = await self._store.get(key_of(rival))
                if rival_record == rival and rival_revision < revision:
                    await self._retire(key_of(record))
                    if isinstance(before, EngineRecord | PoolRecord):
                        log.warning("registration_lost_its_endpoint", instance_id=record.instance_id, error=str(error))
                    raise
