"""The container health check, and the rules for metrics."""

import asyncio
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from services.runtime.health import Health, health_routes
from services.runtime.http_server import HttpServer
from services.runtime.metrics import counter
from services.runtime.probe import main, probe
from tests.conftest import free_port


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.runtime.probe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


async def test_it_succeeds_only_when_the_service_is_ready_and_prints_why_not() -> None:
    health = Health("router")
    health.set("nats", False, "waiting for NATS at nats://n:4222")
    server = HttpServer(Starlette(routes=health_routes(health)), "127.0.0.1", 0)
    await server.start()
    url = f"http://127.0.0.1:{server.port}/readyz"
    unready = await asyncio.to_thread(run, url)
    assert unready.returncode == 1
    assert "waiting for NATS" in unready.stderr
    health.set("nats", True)
    assert (await asyncio.to_thread(run, url)).returncode == 0
    await server.stop()


def test_a_service_that_does_not_answer_is_a_failure() -> None:
    healthy, text = probe(f"http://127.0.0.1:{free_port()}/readyz")
    assert not healthy
    assert "refused" in text


@pytest.mark.parametrize("arguments", [[], ["localhost:1"], ["http://a", "http://b"]])
def test_a_wrong_call_is_told_how_to_call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage:" in capsys.readouterr().err


def test_a_metric_bears_the_name_of_the_product() -> None:
    registry = CollectorRegistry()
    with pytest.raises(ValueError, match="start with kvroute_"):
        counter("requests_total", "Requests", registry=registry)
    counter("kvroute_requests_total", "Requests", ["route"], registry).labels("/query").inc()
    assert registry.get_sample_value("kvroute_requests_total", {"route": "/query"}) == 1
