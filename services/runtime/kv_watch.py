"""Following a NATS KV bucket with a complete, current view. After any loss of the watch the bucket is listed again."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.kv import KV_DEL, KV_PURGE

from services.runtime.logging import get_logger
from services.runtime.tasks import end_tasks

RETRY_SECONDS = 0.5
RELIST_SECONDS = 30.0
MAX_REFUSED = 1000

Record = TypeVar("Record")

log = get_logger("watch")


class KvWatch(Generic[Record]):
    """Follows a bucket. records: by key, those that could be read. revision: up to which they are complete.

    parse: reads a key's value, raises ValueError. on_change: told the records whenever something was put or removed.
    on_refused: told a key whose value could not be read, and why; once for each write.
    """

    def __init__(
        self,
        js: JetStreamContext,
        bucket: str,
        parse: Callable[[str, bytes], Record],
        on_change: Callable[[dict[str, Record]], None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._js = js
        self._bucket = bucket
        self._parse = parse
        self._on_change = on_change
        self._on_refused = on_refused
        self._refused: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._complete = asyncio.Event()
        self._revisions: dict[str, tuple[int, float]] = {}
        self._task: asyncio.Task[None] | None = None
        self.records: dict[str, Record] = {}
        self.revision = 0

    def begin(self) -> None:
        """Begin to watch without waiting for the initial state."""
        self._task = asyncio.create_task(self._follow(), name=f"watch-{self._bucket}")

    async def start(self) -> None:
        """Begin to watch; returns when the initial state is complete."""
        self.begin()
        await self._complete.wait()

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    @property
    def complete(self) -> bool:
        """Whether the initial state is known."""
        return self._complete.is_set()

    def age(self, key: str) -> float:
        """Seconds since this process learnt of the record's latest revision (its own clock)."""
        return time.monotonic() - self._revisions[key][1] if key in self._revisions else 0.0

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
                log.info("watch_lost", bucket=self._bucket, error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)

    async def _watch_once(self) -> None:
        bucket = await self._js.key_value(self._bucket)
        watcher = await bucket.watchall()
        fresh: dict[str, Record] | None = {}
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
                target = self.records if fresh is None else fresh
                revision = entry.revision or 0
                if entry.operation in (KV_DEL, KV_PURGE):
                    target.pop(entry.key, None)
                else:
                    self._take(target, entry.key, entry.value or b"", revision)
                listed = max(listed, revision)
                if fresh is None:
                    self.revision = max(self.revision, listed)
                    self._publish()
                elif entry.delta == 0:
                    self._complete_with(fresh, listed)
                    fresh = None
        finally:
            with contextlib.suppress(NatsError, TimeoutError):
                await watcher.stop()  # type: ignore[no-untyped-call]

    def _take(self, target: dict[str, Record], key: str, value: bytes, revision: int) -> None:
        try:
            target[key] = self._parse(key, value)
        except ValueError as error:
            target.pop(key, None)
            # The bucket is listed again and again.
            if self._refused.get(key) != revision and len(self._refused) < MAX_REFUSED:
                self._refused[key] = revision
                self._on_refused(key, str(error))
            return
        self._refused.pop(key, None)
        if self._revisions.get(key, (0, 0.0))[0] != revision:
            self._revisions[key] = (revision, time.monotonic())

    def _complete_with(self, records: dict[str, Record], revision: int) -> None:
        """A list of the whole bucket has arrived, up to this revision."""
        self.records = records
        self.revision = max(self.revision, revision)
        self._publish()
        self._complete.set()

    def _publish(self) -> None:
        for key in self._revisions.keys() - self.records.keys():
            del self._revisions[key]
        self._changed.set()
        try:
            self._on_change(self.records)
        except Exception:
            # One bad change must not end the watch.
            log.exception("change_failed", bucket=self._bucket)
