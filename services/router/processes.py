"""`router --workers N`: N router processes behind one port, each with an index of its own (docs/adr/0010).

The kernel hands each new connection to one of them. Process k also listens on port + k, where its own readiness and
metrics are.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.logging import get_logger
from services.runtime.service import EXIT_CONFIGURATION

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
STABLE_SECONDS = 30.0

log = get_logger("processes")


@contextlib.asynccontextmanager
async def run_processes(config: Config, health: Health) -> AsyncIterator[None]:
    """Keep the processes running while the context is open; leaving it stops them within the grace time."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    keepers = [
        asyncio.create_task(_keep(number, health, stopping), name=f"worker-{number}")
        for number in range(1, config.router.workers + 1)
    ]
    log.info("processes_started", workers=len(keepers), port=config.router.port)
    try:
        yield
    finally:
        began = loop.time()
        stopping.set()
        await asyncio.gather(*keepers, return_exceptions=True)
        log.info("processes_stopped", seconds=round(loop.time() - began, 2))


async def _keep(number: int, health: Health, stopping: asyncio.Event) -> None:
    """One process, started again when it ends unasked, ever later."""
    wait = FIRST_WAIT_SECONDS
    loop = asyncio.get_running_loop()
    stop = asyncio.create_task(stopping.wait())
    try:
        while not stopping.is_set():
            began = loop.time()
            process = await asyncio.create_subprocess_exec(*_command(), env=_environment(number))
            ended = asyncio.create_task(process.wait())
            await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.is_set():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await _end(process, ended)
                return
            code = await ended
            if code == EXIT_CONFIGURATION:
                health.fail(f"worker {number} cannot be configured; its own lines say why")
                return
            wait = FIRST_WAIT_SECONDS if loop.time() - began > STABLE_SECONDS else min(2 * wait, LONGEST_WAIT_SECONDS)
            log.warning("process_ended", worker=number, exit_code=code, again_in=wait)
            await asyncio.wait({stop}, timeout=wait)
    finally:
        stop.cancel()


async def _end(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    """Wait for a process that was asked to stop. It keeps its own grace time; when ours is over, it is killed."""
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise


def _command() -> list[str]:
    return [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "services.router", *sys.argv[1:]]


def _environment(number: int) -> dict[str, str]:
    return {**os.environ, "KVROUTE_ROUTER__WORKER": str(number)}
