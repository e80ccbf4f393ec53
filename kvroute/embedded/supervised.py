"""A child process that is kept running: an unwanted end is reported and answered with a new start, ever later."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from kvroute.embedded.child import Child
from kvroute.embedded.options import OnLine, Say
from services.runtime.service import EXIT_CONFIGURATION

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
STABLE_SECONDS = 30.0


class Supervised:
    """`on_line` gets (name, line); None: lines are shown only when the process ends unasked.

    final_codes: exit codes after which a new start is pointless; `on_final` is told what happened.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        say: Say,
        on_line: OnLine | None = None,
        on_final: Callable[[str], None] | None = None,
        final_codes: Sequence[int] = (EXIT_CONFIGURATION,),
    ) -> None:
        self.name = name
        self.restarts = 0
        self._command = command
        self._environment = environment
        self._say = say
        self._on_line = on_line
        self._on_final = on_final
        self._final_codes = final_codes
        self._stopping = asyncio.Event()
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the process of the moment, None before the first start."""
        return None if self._child is None else self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process runs at this moment."""
        return self._child is not None and self._child.exit_code is None

    @property
    def last_lines(self) -> list[str]:
        """The last lines it printed."""
        return [] if self._child is None else list(self._child.last_lines)

    async def start(self) -> None:
        """Start it for the first time. Raises OSError."""
        self._child = await self._start_child()
        self._keeping = asyncio.create_task(self._keep(self._child), name=f"keep-{self.name}")

    def kill(self) -> None:
        """kill -9 of the process of the moment; it is started again unless the whole is being stopped."""
        if self._child is not None:
            self._child.kill()

    def give_up(self) -> None:
        """Do not start it again."""
        self._stopping.set()

    async def stop(self, grace: float) -> None:
        """SIGTERM, SIGKILL after the grace time. Idempotent."""
        self._stopping.set()
        while self._keeping is not None and not self._keeping.done():
            if self._child is not None and self._child.exit_code is None and not await self._child.stop(grace):
                self._say(f"{self.name} did not stop within {grace:g} s and was killed")
            await asyncio.wait({self._keeping}, timeout=0.05)

    async def _start_child(self) -> Child:
        return await Child.start(self._command, self._environment, self._take_line)

    def _take_line(self, line: str) -> None:
        if self._on_line is not None:
            self._on_line(self.name, line)

    async def _keep(self, child: Child) -> None:
        wait = FIRST_WAIT_SECONDS
        while True:
            began = time.monotonic()
            code = await child.wait()
            if self._stopping.is_set():
                return
            ended = f"{self.name} {describe(code)}"
            lines = [] if self._on_line is not None else [f"  {line}" for line in child.last_lines]
            if code in self._final_codes and self._on_final is not None:
                self._on_final("\n".join([ended, *(f"  {line}" for line in child.last_lines)]))
                return
            if time.monotonic() - began > STABLE_SECONDS:
                wait = FIRST_WAIT_SECONDS
            self._say("\n".join([*lines, f"{ended}; it is started again in {wait:.1f} s"]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait * random.uniform(0.8, 1.2))
            if self._stopping.is_set():
                return
            wait = min(LONGEST_WAIT_SECONDS, wait * 2)
            try:
                child = self._child = await self._start_child()
            except OSError as error:
                self._say(f"{self.name} cannot be started: {error}")
            self.restarts += 1


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"stopped with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
