"""Warm start: the router restores itself from a snapshot and goes on in the stream where the snapshot ends.

One replica writes (the one that holds the lease ``router_snapshots``), from time to time and when it is stopped. A
snapshot that does not fit is refused with a reason, and the next older one or the stream alone serves instead.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from nats.errors import Error as NatsError
from nats.js import JetStreamContext

from schemas.subjects import INDEX_STREAM
from services.router import metrics, snapshot_form
from services.router.consumer import IndexConsumer, creation_of
from services.router.index.port import PrefixIndex
from services.router.snapshot_form import SnapshotRefusedError
from services.router.snapshot_store import Slot, SnapshotStore
from services.router.spaces import Spaces
from services.runtime.kv_lease import KvLease
from services.runtime.logging import get_logger
from services.runtime.tasks import end_tasks

LEASE = "router_snapshots"
LEASE_SECONDS = 15.0
RETRY_SECONDS = 0.5
SHARE_OF_GRACE = 0.5
POLL_SECONDS = 1.0

log = get_logger("snapshots")


class Snapshots:
    """Restores before the consumer starts, writes while it runs. interval: seconds between two, 0 for none.

    timeout: seconds after which a restore is given up. grace: seconds that a stopping process has in all.
    """

    def __init__(
        self,
        js: JetStreamContext,
        spaces: Spaces,
        consumer: IndexConsumer,
        make_index: Callable[[], PrefixIndex],
        interval: float,
        timeout: float,
        grace: float,
    ) -> None:
        self._js = js
        self._store = SnapshotStore(js)
        self._lease = KvLease(js, LEASE, LEASE_SECONDS)
        self._spaces = spaces
        self._consumer = consumer
        self._make_index = make_index
        self._interval = interval
        self._timeout = timeout
        self._grace = grace
        self._seconds = 0.0
        self._last: tuple[int, int] = (0, 0)
        self._task: asyncio.Task[None] | None = None

    async def restore(self) -> bool:
        """Fill the spaces and put the consumer behind the snapshot; whether one could be used. Never raises for long:
        after the timeout the stream alone has to do."""
        if not self._interval:
            return False
        ends = time.monotonic() + self._timeout
        while time.monotonic() < ends:
            try:
                return await self._restore_newest(ends)
            except (NatsError, TimeoutError, OSError) as error:
                log.info("snapshots_not_reached", error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
        log.warning("restore_given_up", seconds=self._timeout)
        metrics.SNAPSHOTS.labels("refused_timeout").inc()
        return False

    @property
    def leads(self) -> bool:
        """Whether this replica is the one that writes."""
        return self._lease.held

    async def take_over_complete(self) -> bool:
        """Take over the newest snapshot if another replica has written a complete one since the last look.

        Whether it was. Raises SnapshotRefusedError, nats.errors.Error.
        """
        info = await self._js.stream_info(INDEX_STREAM)
        slots = await self._store.slots()
        if not slots or (slots[0].stream, slots[0].position) == self._last:
            return False
        slot = slots[0]
        _check_place(slot, creation_of(info), info.state.first_seq, info.state.last_seq)
        self._last = (slot.stream, slot.position)
        body = await self._store.load(slot, self._timeout)
        header, restored = await asyncio.to_thread(snapshot_form.read, body, self._make_index)
        if header.incomplete_before:
            return False
        async with self._consumer.paused():
            snapshot_form.adopt(self._spaces, header, restored)
            self._consumer.resume(header.stream, header.position)
        metrics.SNAPSHOTS.labels("restored").inc()
        return True

    def start(self) -> None:
        """Begin to write snapshots whenever this replica holds the lease."""
        if self._interval:
            self._lease.start()
            self._task = asyncio.create_task(self._write_regularly(), name="snapshots")

    async def stop(self) -> None:
        """Write a last one, if it fits into the grace time, and give the lease up. The consumer has stopped before."""
        task, self._task = self._task, None
        if task is None:
            return
        await end_tasks([task])
        budget = self._grace * SHARE_OF_GRACE
        if self._lease.held and self._is_new():
            if self._seconds < budget:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._try_to_write(), budget)
            else:
                log.info("no_last_snapshot", would_take=round(self._seconds, 1), allowed=budget)
        await self._lease.stop()

    async def write(self) -> None:
        """Write one now. Nothing is applied while the state is copied; queries go on. Raises nats.errors.Error."""
        began = time.monotonic()
        async with self._consumer.paused():
            stream, position = self._consumer.stream, self._consumer.position
            content = snapshot_form.content_of(self._spaces, stream, position, time.time())
            body = await asyncio.to_thread(snapshot_form.write, content)
        paused = time.monotonic() - began
        await self._store.save(stream, position, body)
        self._last = (stream, position)
        self._seconds = time.monotonic() - began
        metrics.SNAPSHOTS.labels("written").inc()
        metrics.SNAPSHOT_BYTES.set(len(body))
        metrics.SNAPSHOT_SECONDS.set(self._seconds)
        metrics.SNAPSHOT_POSITION.set(position)
        log.info(
            "snapshot_written",
            position=position,
            bytes=len(body),
            seconds=round(self._seconds, 3),
            paused_seconds=round(paused, 3),
        )

    def _is_new(self) -> bool:
        """Whether there is something to write: the stream is being followed and has moved on."""
        here = (self._consumer.stream, self._consumer.position)
        return self._consumer.caught_up and here != self._last and here[1] > 0

    async def _write_regularly(self) -> None:
        while True:
            await self._lease.wait()
            if self._is_new():
                await self._try_to_write()
                await asyncio.sleep(self._interval)
            else:
                await asyncio.sleep(min(POLL_SECONDS, self._interval))

    async def _try_to_write(self) -> None:
        try:
            await self.write()
        except (NatsError, TimeoutError, OSError) as error:
            metrics.SNAPSHOTS.labels("failed").inc()
            log.warning("snapshot_not_written", error=str(error) or type(error).__name__)
        except Exception:
            metrics.SNAPSHOTS.labels("failed").inc()
            log.exception("snapshot_not_written")

    async def _restore_newest(self, ends: float) -> bool:
        info = await self._js.stream_info(INDEX_STREAM)
        stream, first, last = creation_of(info), info.state.first_seq, info.state.last_seq
        for slot in await self._store.slots():
            try:
                _check_place(slot, stream, first, last)
                await self._restore_slot(slot, stream, last, ends)
            except SnapshotRefusedError as error:
                metrics.SNAPSHOTS.labels(f"refused_{error.reason}").inc()
                log.warning("snapshot_refused", slot=slot.name, reason=error.reason, error=str(error))
                continue
            return True
        return False

    async def _restore_slot(self, slot: Slot, stream: int, last: int, ends: float) -> None:
        began = time.monotonic()
        body = await self._store.load(slot, max(1.0, ends - began))
        loaded = time.monotonic()
        header, restored = await asyncio.to_thread(snapshot_form.read, body, self._make_index)
        if (header.stream, header.position) != (slot.stream, slot.position):
            raise SnapshotRefusedError("foreign", "its tag names another place in the stream than the snapshot itself")
        snapshot_form.adopt(self._spaces, header, restored)
        self._consumer.resume(stream, header.position)
        self._last = (stream, header.position)
        metrics.SNAPSHOTS.labels("restored").inc()
        log.info(
            "snapshot_restored",
            position=header.position,
            stream_end=last,
            bytes=len(body),
            load_seconds=round(loaded - began, 3),
            restore_seconds=round(time.monotonic() - loaded, 3),
            age_seconds=round(time.time() - header.taken_at, 1),
        )


def _check_place(slot: Slot, stream: int, first: int, last: int) -> None:
    """Whether the stream goes on behind a snapshot without a hole. Raises SnapshotRefusedError."""
    if slot.stream != stream:
        raise SnapshotRefusedError("foreign", "it belongs to another stream KV_INDEX than the one that exists")
    if slot.position > last:
        raise SnapshotRefusedError("ahead", f"it ends at {slot.position}, the stream at {last}")
    if first > slot.position + 1:
        raise SnapshotRefusedError("cut", f"it ends at {slot.position}, the stream begins at {first}")
