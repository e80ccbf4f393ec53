"""How every service runs: options, configuration, logging, uvloop, signals, grace time."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from services.runtime.config import Config, ConfigError, load_config
from services.runtime.health import Health
from services.runtime.logging import configure_logging, get_logger

Start = Callable[[Config, Health], AbstractAsyncContextManager[object]]

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 2


def run_service(name: str, start: Start, argv: Sequence[str] | None = None, epilog: str | None = None) -> int:
    """Run until SIGTERM or SIGINT; the exit code (0 stopped, 1 failed, 2 wrong configuration)."""
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{name}",
        description=f"kvroute {name}. Settings: one YAML file, section {name}, overridden by KVROUTE_<SECTION>__<KEY>.",
        epilog=epilog,
    )
    parser.add_argument("--config", metavar="FILE", help="kvroute.yaml; default: $KVROUTE_CONFIG, else built-in values")
    parser.add_argument("--check", action="store_true", help="validate the configuration and exit")
    options = parser.parse_args(argv)
    try:
        config = load_config(options.config)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    if options.check:
        print("configuration is valid")
        return EXIT_STOPPED
    configure_logging(name, config.logging)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_run(name, start, config))
    return uvloop.run(_run(name, start, config))


async def _run(name: str, start: Start, config: Config) -> int:
    log = get_logger("service")
    health = Health(name)
    started, stop = asyncio.Event(), asyncio.Event()
    working = asyncio.create_task(_work(start, config, health, started, stop), name=name)
    loop = asyncio.get_running_loop()

    failures: list[str] = []

    def on_signal(number: int) -> None:
        log.info("stopping_at_once" if stop.is_set() else "stopping", signal=signal.Signals(number).name)
        begin_to_stop()

    def on_failure(reason: str) -> None:
        log.error("failed", error=reason)
        failures.append(reason)
        if not stop.is_set():
            begin_to_stop()

    def begin_to_stop() -> None:
        first = not stop.is_set()
        health.stopping = True
        stop.set()
        if first and started.is_set():
            loop.call_later(config.runtime.shutdown_grace, _give_up, working, config.runtime.shutdown_grace)
        else:
            working.cancel()

    health.on_failure = on_failure
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await working
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    except OSError as error:
        log.error("failed", error=str(error))
        return EXIT_FAILED
    except Exception:
        log.exception("failed")
        return EXIT_FAILED
    log.info("stopped")
    return EXIT_FAILED if failures else EXIT_STOPPED


def _give_up(working: asyncio.Task[None], grace: float) -> None:
    if not working.done():
        get_logger("service").warning("grace_time_over", seconds=grace)
        working.cancel()


async def _work(start: Start, config: Config, health: Health, started: asyncio.Event, stop: asyncio.Event) -> None:
    log = get_logger("service")
    log.info("starting")
    async with start(config, health):
        started.set()
        log.info("started")
        await stop.wait()
