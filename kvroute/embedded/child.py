"""One child process: started so that it cannot outlive this one, its lines read, stopped with a grace time."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

MAX_LINE = 64 * 1024
KEPT_LINES = 20
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with(parent: int) -> Callable[[], None] | None:
    """What a child does between fork and exec so that the kernel kills it when its parent is gone."""
    libc = _libc
    if libc is None:
        return None

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie


class Child:
    """A running child process. `on_line` gets every line it prints, both streams together."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._process = process
        self._on_line = on_line
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading = asyncio.create_task(self._read(), name=f"lines-{process.pid}")

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str] | None, on_line: Callable[[str], None]
    ) -> "Child":
        """Start a program. Raises OSError when it cannot be.

        It leads a process group of its own: a Ctrl-C at the terminal reaches this process alone, which stops its
        children in order. Linux ties a child to the thread that started it, so that one has to stay.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            env=None if environment is None else dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
        return cls(process, on_line)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: killed by that signal."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and its last line; the exit code."""
        code = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=1.0)
        return code

    def kill(self) -> None:
        """kill -9. Harmless when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace: float) -> bool:
        """SIGTERM, and SIGKILL after the grace time; whether the grace time was enough."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace)
            in_time = True
        except TimeoutError:
            self.kill()
            in_time = False
        await self.wait()
        return in_time

    async def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(MAX_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE:
                # A line without an end must not fill the memory: it becomes several.
                lines.append(rest)
                rest = b""
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self.last_lines.append(text)
            self._on_line(text)
