"""Where publishers' batches end: read from KV_EVENTS and the bucket ``kv_cursors``, which this keeps up to date."""

import asyncio
import time
from collections.abc import Callable, Iterable

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError

from schemas.subjects import CURSORS_BUCKET, stream_key
from services.ingest.cursors import Cursor, dump_cursor, load_cursor
from services.ingest.lane import newest_stored, subject_of
from services.ingest.registrations import Publisher
from services.ingest.subscriptions import Subscription
from services.runtime.logging import get_logger

RETRY_SECONDS = 0.5
SCAN_SECONDS = 0.5
WRITE_SECONDS = 30.0

log = get_logger("ingest")


class CursorStore:
    """A generation that began is written down at once, a position every half minute."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js
        self._written: dict[str, tuple[Cursor, float]] = {}

    async def position_of(self, publisher: Publisher) -> tuple[int, Cursor | None]:
        """Stream sequence of the newest stored batch (0: none), and how far the publisher was published (None: never).

        Waits for NATS for as long as it takes.
        """
        while True:
            try:
                sequence, stored = await newest_stored(self._js, subject_of(publisher))
                kept = await self._kept(publisher)
            except (NatsError, TimeoutError) as error:
                log.info("waiting_for_stream", subject=subject_of(publisher), error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            cursor = Cursor.of(stored) if stored is not None else None
            if cursor is None or (kept is not None and cursor.is_behind(kept)):
                cursor = kept
            return sequence, cursor

    async def run(self, subscriptions: Callable[[], Iterable[Subscription]]) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            try:
                await self.write(subscriptions(), time.monotonic())
            except (NatsError, TimeoutError, OSError) as error:
                log.debug("cursor_not_written", error=str(error) or type(error).__name__)

    async def write(self, subscriptions: Iterable[Subscription], now: float) -> None:
        """Write what is due. now: any clock, in seconds."""
        for subscription in subscriptions:
            cursor, publisher = subscription.intake.published_up_to, subscription.publisher
            if cursor is None or not publisher.primary:
                continue
            key = stream_key(*publisher.key[:3])
            old, at = self._written.get(key, (None, 0.0))
            if old == cursor or (old is not None and old.generation == cursor.generation and now - at < WRITE_SECONDS):
                continue
            await (await self._js.key_value(CURSORS_BUCKET)).put(key, dump_cursor(cursor))
            self._written[key] = (cursor, now)

    async def _kept(self, publisher: Publisher) -> Cursor | None:
        try:
            entry = await (await self._js.key_value(CURSORS_BUCKET)).get(stream_key(*publisher.key[:3]))
        except KeyNotFoundError:
            return None
        return load_cursor(entry.value or b"")
