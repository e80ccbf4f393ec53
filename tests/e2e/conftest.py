"""One stack for all end-to-end tests: NATS, Redis and the four services as processes; tests use names of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import free_port, make_nats_server, make_redis_server
from tests.e2e.support import Pipeline, Router

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0


@dataclass(frozen=True)
class Stack:
    """Where the running system is reached."""

    nats_url: str
    router_url: str
    ingest_url: str
    matcher_url: str
    inference_url: str
    management_url: str


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The whole system on free ports, ready."""
    folder = tmp_path_factory.mktemp("stack")
    names = ("router", "ingest", "matcher", "inference", "management", "metrics")
    ports = dict(zip(names, (free_port() for _ in names), strict=True))
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    with contextlib.ExitStack() as cleanup:
        nats, redis = make_nats_server(folder / "nats"), make_redis_server(folder)
        for server in (nats, redis):
            cleanup.callback(server.stop)
            server.start()
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "KVROUTE_NATS__URL": nats.url,
            "KVROUTE_REDIS__URL": redis.url,
            "KVROUTE_ROUTER__PORT": str(ports["router"]),
            "KVROUTE_INGEST__PORT": str(ports["ingest"]),
            "KVROUTE_MATCHER__PORT": str(ports["matcher"]),
            "KVROUTE_COORDINATOR__INFERENCE_PORT": str(ports["inference"]),
            "KVROUTE_COORDINATOR__MANAGEMENT_PORT": str(ports["management"]),
            "KVROUTE_COORDINATOR__METRICS_PORT": str(ports["metrics"]),
            "KVROUTE_COORDINATOR__FRONT_DOOR__ROUTER_URL": urls["router"],
        }
        services = {}
        for service in ("ingest", "matcher", "router", "coordinator"):
            log = cleanup.enter_context((folder / f"{service}.log").open("wb"))
            command = [sys.executable, "-m", f"services.{service}"]
            services[service] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
            cleanup.callback(services[service].kill)
        for service, process in services.items():
            url = urls["management" if service == "coordinator" else service]
            _wait_ready(process, f"{url}/readyz", folder / f"{service}.log")
        yield Stack(nats.url, urls["router"], urls["ingest"], urls["matcher"], urls["inference"], urls["management"])
        for process in services.values():
            process.send_signal(signal.SIGTERM)
        codes = {service: process.wait(timeout=20) for service, process in services.items()}
    assert set(codes.values()) == {0}, codes


@pytest.fixture
async def router(stack: Stack) -> AsyncIterator[Router]:
    """A client of the router."""
    router = Router(stack.router_url)
    yield router
    await router.close()


@pytest.fixture
async def pipeline(stack: Stack) -> AsyncIterator[Pipeline]:
    """Knows when everything that was published has reached the router."""
    pipeline = await Pipeline.connect(stack.nats_url, stack.ingest_url, stack.router_url)
    yield pipeline
    await pipeline.close()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    reason = ""
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(url, timeout=2.0):
                return
        except urllib.error.HTTPError as error:
            reason = error.read().decode()
        except OSError as error:
            reason = str(error)
        time.sleep(0.05)
    raise AssertionError(f"{url} is not ready: {reason}\n{log.read_text()[-3000:]}")
