"""How far the index has been read: readiness with a reason and a deadline, counts into metrics."""

import dataclasses
import time

from services.router import metrics
from services.router.space import BlockCounts
from services.router.spaces import ApplyCounts, Spaces
from services.runtime.health import Health
from services.runtime.logging import get_logger

CONDITION = "index"
OUTCOMES = ("applied", "retired_generation", "repeated_group", "refused")
BLOCK_OUTCOMES = tuple(field.name for field in dataclasses.fields(BlockCounts))

log = get_logger("consumer")


class Progress:
    """Readiness condition `index`: true as soon as what the stream held at the last look has been applied."""

    def __init__(self, health: Health, spaces: Spaces, catch_up_timeout: float) -> None:
        self._health = health
        self._spaces = spaces
        self._catch_up_timeout = catch_up_timeout
        self._target = 0
        self._behind_since = time.monotonic()
        self._caught_up = False
        self._reported = ApplyCounts()

    @property
    def caught_up(self) -> bool:
        """Whether what the stream held at the last look has been applied."""
        return self._caught_up

    def note(self, text: str) -> None:
        """A remark about the history that is known here."""
        self._health.note("history", text)

    def begin(self) -> None:
        """Nothing has been read yet."""
        self._behind_since = time.monotonic()
        self._health.set(CONDITION, False, "reading the stream has not begun")

    def target(self, last: int) -> None:
        """The stream reaches to this sequence now."""
        if not self._caught_up:
            self._target = max(self._target, last)
        metrics.STREAM_END.set(last)

    def lost(self, reason: str) -> None:
        """The stream cannot be read; when it can again, what has come meanwhile is caught up with first."""
        if self._caught_up:
            self._caught_up = False
            self._behind_since = time.monotonic()
            self._target = 0
        self._health.set(CONDITION, False, reason)

    def report(self, position: int) -> None:
        """Everything up to this sequence is applied."""
        metrics.POSITION.set(position)
        self._report_counts()
        if self._caught_up:
            return
        waited = time.monotonic() - self._behind_since
        if position >= self._target:
            self._caught_up = True
            self._health.set(CONDITION, True)
            log.info("index_caught_up", position=position, seconds=round(waited, 3))
            return
        reason = f"catching up: {position} of {self._target} messages after {waited:.0f} s"
        if waited > self._catch_up_timeout:
            reason += f", later than the deadline of {self._catch_up_timeout:.0f} s (router.catch_up_timeout)"
        self._health.set(CONDITION, False, reason)

    def _report_counts(self) -> None:
        counts, before = self._spaces.counts, self._reported
        for name in OUTCOMES:
            grown = getattr(counts, name) - getattr(before, name)
            if grown:
                metrics.EVENTS.labels(name).inc(grown)
        for name in BLOCK_OUTCOMES:
            grown = getattr(counts.blocks, name) - getattr(before.blocks, name)
            if grown:
                metrics.EVENT_BLOCKS.labels(name).inc(grown)
        self._reported = dataclasses.replace(counts, blocks=dataclasses.replace(counts.blocks))
