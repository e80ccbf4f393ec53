"""The registry in the KV bucket ``kv_registry``: write records, and follow them with a complete, current view."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from schemas.registry import EngineRecord, PoolRecord, RetiredRecord, dump_record, load_record
from schemas.subjects import REGISTRY_BUCKET, engine_key, pool_key
from services.runtime.kv_watch import KvWatch
from services.runtime.logging import get_logger
from services.runtime.metrics import counter

AnyRecord = EngineRecord | PoolRecord | RetiredRecord
MAX_PROBLEMS = 5

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
    """Follows the registry. on_change: told every new view, the first one as soon as it is complete."""

    def __init__(self, js: JetStreamContext, on_change: Callable[[Registry], None] | None = None) -> None:
        self._watch = KvWatch(js, REGISTRY_BUCKET, _read, self._changed, _report)
        self._on_change = on_change
        self.registry = Registry()

    @property
    def revision(self) -> int:
        """The bucket's revision up to which `registry` is complete."""
        return self._watch.revision

    async def start(self) -> None:
        """Begin to watch; returns when the initial state is complete."""
        await self._watch.start()

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        await self._watch.stop()

    async def wait_for_revision(self, revision: int, timeout: float = 5.0) -> bool:
        """Whether a write of this revision is visible here within the timeout (read your writes)."""
        return await self._watch.wait_for_revision(revision, timeout)

    def _changed(self, records: dict[str, AnyRecord]) -> None:
        registry = registry_of(records)
        changed = registry != self.registry
        self.registry = registry
        if self._on_change is not None and (changed or not self._watch.complete):
            self._on_change(registry)


def _report(key: str, problem: str) -> None:
    REFUSED.inc()
    fix = "register the instance again, or delete the key"
    log.warning("registry_record_refused", key=key, problem=problem, fix=fix)
