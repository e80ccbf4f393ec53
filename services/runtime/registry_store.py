"""The registry in the KV bucket ``kv_registry``: write records, and follow them with a complete, current view."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue
from pydantic import ValidationError

from schemas.registry import EngineRecord, PoolRecord, RetiredRecord, dump_record, load_record
from schemas.subjects import REGISTRY_BUCKET, engine_key, pool_key
from services.runtime.logging import get_logger
from services.runtime.metrics import counter
from services.runtime.tasks import end_tasks

AnyRecord = EngineRecord | PoolRecord | RetiredRecord
RETRY_SECONDS = 0.5
RELIST_SECONDS = 30.0
MAX_PROBLEMS = 5
MAX_REFUSED = 1000

REFUSED = counter("kvroute_registry_refused_records_total", "Registry records that could not be used")

log = get_logger("registry")


def key_of(record: AnyRecord) -> str:
    """The bucket key of a record; a tombstone takes the place of what it retires."""
    if isinstance(record, PoolRecord) or (isinstance(record, RetiredRecord) and record.retired_kind == "pool"):
        return pool_key(record.instance_id)
    return engine_key(record.instance_id, record.dp_rank)


@dataclass(frozen=True, slots=True)
class Registry:
    """A frozen view of the bucket."""

    engines: dict[tuple[str, int], EngineRecord] = field(default_factory=dict)
    pools: dict[str, PoolRecord] = field(default_factory=dict)
    retired: tuple[RetiredRecord, ...] = ()


def registry_of(records: dict[str, AnyRecord]) -> Registry:
    """The view over records by key."""
    engines, pools, retired = {}, {}, []
    for record in records.values():
        if isinstance(record, EngineRecord):
            engines[record.instance_id, record.dp_rank] = record
        elif isinstance(record, PoolRecord):
            pools[record.instance_id] = record
        else:
            retired.append(record)
    return Registry(engines, pools, tuple(retired))


class _UnusableError(ValueError):
    """What stands under a key is no record, or not the record of that key."""


def _read(key: str, body: bytes | None) -> AnyRecord:
    try:
        record = load_record(body or b"")
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)[:MAX_PROBLEMS]
        named = [f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems]
        raise _UnusableError("; ".join(named)) from None
    if key_of(record) != key:
        raise _UnusableError(f"instance_id: belongs under the key {key_of(record)[:80]}")
    return record


class RegistryStore:
    """Reads and writes single records. Raises nats.errors.Error when NATS cannot be reached."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js
        self._bucket: KeyValue | None = None

    async def bucket(self) -> KeyValue:
        """The KV bucket, for compare-and-set."""
        if self._bucket is None:
            self._bucket = await self._js.key_value(REGISTRY_BUCKET)
        return self._bucket

    async def put(self, record: AnyRecord) -> int:
        """Write a record over whatever is there; the revision."""
        return await (await self.bucket()).put(key_of(record), dump_record(record))

    async def retire(self, record: RetiredRecord) -> int:
        """Leave a tombstone; the revision."""
        return await self.put(record)

    async def get(self, key: str) -> tuple[AnyRecord | None, int]:
        """A record and its revision; (None, 0) when there is none or it cannot be read."""
        try:
            entry = await (await self.bucket()).get(key)
        except KeyNotFoundError:
            return None, 0
        try:
            return _read(key, entry.value), entry.revision or 0
        except _UnusableError:
            return None, entry.revision or 0

    async def all(self) -> dict[str, AnyRecord]:
        """Every readable record by key."""
        # Not KeyValue.keys(): it may report none while the first values are still on their way to the client.
        prefix = f"$KV.{REGISTRY_BUCKET}."
        state = (await self._js.stream_info(f"KV_{REGISTRY_BUCKET}", subjects_filter=">")).state
        records = {}
        for key in (subject.removeprefix(prefix) for subject in state.subjects or {}):
            record, _ = await self.get(key)
            if record is not None:
                records[key] = record
        return records

    async def purge(self, key: str) -> None:
        """Remove a key for good."""
        await (await self.bucket()).purge(key)


class RegistryWatch:
    """Follows the bucket. After any loss of the watch the whole bucket is listed again, so nothing is missed."""

    def __init__(self, js: JetStreamContext, on_change: Callable[[Registry], None] | None = None) -> None:
        self._js = js
        self._on_change = on_change
        self._records: dict[str, AnyRecord] = {}
        self._changed = asyncio.Event()
        self._complete = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._refused: dict[str, int] = {}
        self.registry = Registry()
        self.revision = 0

    async def start(self) -> None:
        """Begin to watch; returns when the initial state is complete."""
        self._task = asyncio.create_task(self._follow(), name="registry-watch")
        await self._complete.wait()

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def wait_for_revision(self, revision: int, timeout: float = 5.0) -> bool:
        """Whether a write of this revision is visible here within the timeout (read your writes)."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.revision < revision:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), remaining)
        return True

    def _reconnects(self) -> int:
        return int(self._js._nc.stats["reconnects"])

    async def _follow(self) -> None:
        # Python 3.11's wait_for, inside the library's updates(), may swallow the cancellation of stop(); the task is
        # asked for as well, so that a stop never takes longer than one wait.
        while self._task is not None:
            try:
                await self._watch_once()
            except (NatsError, TimeoutError, OSError) as error:
                log.info("registry_watch_lost", error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)

    async def _watch_once(self) -> None:
        bucket = await self._js.key_value(REGISTRY_BUCKET)
        watcher = await bucket.watchall()
        fresh: dict[str, AnyRecord] | None = {}
        listed = self.revision
        listed_at = asyncio.get_running_loop().time()
        reconnects = self._reconnects()
        try:
            while self._task is not None:
                # A list from time to time heals what an ordered consumer may miss while a server restarts.
                if asyncio.get_running_loop().time() - listed_at > RELIST_SECONDS or self._reconnects() != reconnects:
                    return
                try:
                    entry = await watcher.updates(timeout=1.0)  # type: ignore[no-untyped-call]
                except TimeoutError:
                    continue
                if entry is None:
                    # The library's "no values" may come before the first values do, so a bucket is only believed to be
                    # empty when the server says so: taking that for real would retire every engine of the index.
                    if fresh is not None and (fresh or (await bucket.status()).values == 0):
                        self._complete_with(fresh, listed)
                        fresh = None
                    continue
                target = self._records if fresh is None else fresh
                if entry.operation in (KV_DEL, KV_PURGE):
                    target.pop(entry.key, None)
                else:
                    try:
                        target[entry.key] = _read(entry.key, entry.value)
                        self._refused.pop(entry.key, None)
                    except _UnusableError as error:
                        target.pop(entry.key, None)
                        self._report(entry.key, entry.revision or 0, str(error))
                listed = max(listed, entry.revision or 0)
                if fresh is None:
                    self.revision = max(self.revision, listed)
                    self._publish()
                elif entry.delta == 0:
                    self._complete_with(fresh, listed)
                    fresh = None
        finally:
            with contextlib.suppress(NatsError, TimeoutError):
                await watcher.stop()  # type: ignore[no-untyped-call]

    def _report(self, key: str, revision: int, problem: str) -> None:
        """Once for each write; the bucket is listed again and again."""
        if self._refused.get(key) != revision and len(self._refused) < MAX_REFUSED:
            self._refused[key] = revision
            REFUSED.inc()
            fix = "register the instance again, or delete the key"
            log.warning("registry_record_refused", key=key, problem=problem, fix=fix)

    def _complete_with(self, records: dict[str, AnyRecord], revision: int) -> None:
        """A list of the whole bucket has arrived, up to this revision."""
        self._records = records
        self.revision = max(self.revision, revision)
        self._publish()
        self._complete.set()

    def _publish(self) -> None:
        registry = registry_of(self._records)
        changed = registry != self.registry
        self.registry = registry
        self._changed.set()
        if self._on_change is not None and (changed or not self._complete.is_set()):
            try:
                self._on_change(registry)
            except Exception:
                # One bad change must not end the watch.
                log.exception("registry_change_failed")
