"""The state machine as NATS subjects: one note per message and state, fire and forget, bounded per second."""

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

from nats.errors import Error as NatsError

from schemas.events import StateNote, encode
from schemas.subjects import state_subject
from services.runtime.metrics import counter

MAX_WAITING_NOTES = 4096

SKIPPED = counter("kvroute_tap_notes_skipped_total", "State notes not published because of the rate limit", ["service"])


class StateTap:
    """Publishes StateNotes on ``kv.state.<state>.<model>``; what exceeds the rate is skipped and counted."""

    def __init__(self, nc: Any, service: str, max_per_second: int = 2000) -> None:
        self._nc = nc
        self._rate = float(max_per_second)
        self._allowance = self._rate
        self._last = time.monotonic()
        self._skipped = SKIPPED.labels(service)
        self._waiting: deque[StateNote] = deque()
        self._task: asyncio.Task[None] | None = None

    def note(self, note: StateNote) -> None:
        """Publish one note soon; never waits and never raises."""
        now = time.monotonic()
        self._allowance = min(self._rate, self._allowance + (now - self._last) * self._rate)
        self._last = now
        if self._allowance < 1.0 or not self._nc.is_connected or len(self._waiting) >= MAX_WAITING_NOTES:
            self._skipped.inc()
            return
        self._allowance -= 1.0
        self._waiting.append(note)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(), name="taps")

    async def _send(self) -> None:
        while self._waiting:
            note = self._waiting.popleft()
            try:
                await self._nc.publish(state_subject(note.state, note.model), encode(note))
            except (NatsError, OSError):
                self._skipped.inc()

    async def stop(self) -> None:
        """Send what waits, for a second at most. Idempotent."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, 1.0)
            self._task = None
