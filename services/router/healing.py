"""A router that joined a stream whose beginning was gone: how it comes to know what it has missed.

While another replica writes snapshots (it holds their lease), that one knows more: its next complete snapshot is taken
over. When this replica holds the lease itself, nobody does, and the publishers are asked to say everything again
(``kv.control.resync.>``). That begins a new generation of each, so it is never asked while another replica is complete.
"""

import asyncio

from nats.aio.client import Client
from nats.errors import Error as NatsError

from schemas.subjects import resync_subject
from services.router import metrics
from services.router.publishers import PublisherKey
from services.router.snapshot_form import SnapshotRefusedError
from services.router.snapshots import Snapshots
from services.router.spaces import Spaces
from services.runtime.logging import get_logger
from services.runtime.tasks import end_tasks

LOOK_SECONDS = 2.0

log = get_logger("healing")


class Healing:
    """Looks now and then whether something is missing, and does what can be done about it."""

    def __init__(self, nc: Client, spaces: Spaces, snapshots: Snapshots) -> None:
        self._nc = nc
        self._spaces = spaces
        self._snapshots = snapshots
        self._asked: set[tuple[PublisherKey, int]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="healing")

    async def stop(self) -> None:
        """Stop looking. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self.missing() or not self._nc.is_connected:
                self._asked.clear()
                continue
            try:
                if self._snapshots.leads:
                    await self.ask()
                elif await self._snapshots.take_over_complete():
                    log.info("history_completed", source="a snapshot of another replica")
            except SnapshotRefusedError as error:
                log.info("snapshot_refused", reason=error.reason, error=str(error))
            except (NatsError, TimeoutError, OSError) as error:
                log.info("not_healed_yet", error=str(error) or type(error).__name__)

    def missing(self) -> list[tuple[PublisherKey, int]]:
        """Publishers whose life began before the stream's history does, with their generation."""
        before = self._spaces.incomplete_before
        if not before:
            return []
        standings = self._spaces.standings.all()
        return [(key, one.generation) for key, one in standings.items() if one.generation < before]

    async def ask(self) -> None:
        """Ask every publisher of which something is missing to say it again; each life is asked once."""
        for key, generation in self.missing():
            if (key, generation) not in self._asked:
                self._asked.add((key, generation))
                await self._nc.publish(resync_subject(*key), b"")
                metrics.RESYNCS.inc()
                log.info("asked_to_say_it_again", publisher=key, generation=generation)
