"""``python -m services.router [--workers N]``."""

import argparse
import os
import sys
from contextlib import AbstractAsyncContextManager

from services.router.app import start
from services.router.processes import run_processes
from services.runtime.config import Config
from services.runtime.health import Health
from services.runtime.service import run_service

OPTIONS = "--workers N: answer from N processes, each with its own index (router.workers)."


def start_all(config: Config, health: Health) -> AbstractAsyncContextManager[None]:
    """One router, or the processes that share its port."""
    several = config.router.workers > 1 and not config.router.worker
    return (run_processes if several else start)(config, health)


def main() -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workers")
    options, rest = parser.parse_known_args()
    if options.workers is not None:
        os.environ["KVROUTE_ROUTER__WORKERS"] = options.workers
    return run_service("router", start_all, rest, OPTIONS)


if __name__ == "__main__":
    sys.exit(main())
