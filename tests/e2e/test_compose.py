"""compose.yaml and compose.demo.yaml for real, where there is a container engine (podman-compose or docker compose)."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import free_port

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROJECT = "kvroute-test"
IMAGE = "kvroute:test"
SERVICES = ("ingest", "matcher", "router", "coordinator")
PORTS = ("NATS_PORT", "ROUTER_PORT", "INFERENCE_PORT", "MANAGEMENT_PORT", "METRICS_PORT")


def _engine() -> tuple[str, list[str]]:
    """The container engine and its compose command; skips the test where there is none."""
    if shutil.which("podman") and shutil.which("podman-compose"):
        return "podman", ["podman-compose"]
    if shutil.which("docker"):
        works = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=20, check=False)
        answers = subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False)
        if works.returncode == 0 and answers.returncode == 0:
            return "docker", ["docker", "compose"]
    pytest.skip("no container engine: neither podman-compose nor a running docker")


@dataclass
class Compose:
    engine: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, timeout: float = 300) -> str:
        files = ["-p", PROJECT, "-f", str(ROOT / "compose.yaml"), "-f", str(ROOT / "compose.demo.yaml")]
        return _run([*self.command, *files, *arguments], self.environment, timeout)

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.engine, "exec", self.name(service), *command], capture_output=True, text=True, timeout=60, check=False
        )

    def name(self, service: str) -> str:
        separator = "_" if self.engine == "podman" else "-"
        return f"{PROJECT}{separator}{service}{separator}1"

    def inspect(self, service: str) -> dict[str, object]:
        (found,) = json.loads(_run([self.engine, "inspect", self.name(service)], {}, 60))
        return dict(found)

    def exit_code(self, service: str) -> int | None:
        state = self.inspect(service)["State"]
        assert isinstance(state, dict)
        return int(state["ExitCode"]) if state["Status"] == "exited" else None

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.environment[port]}"


def _run(command: list[str], environment: dict[str, str], timeout: float) -> str:
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]} {result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    engine, command = _engine()
    environment = {port: str(free_port()) for port in PORTS} | {"KVROUTE_IMAGE": IMAGE}
    compose = Compose(engine, command, environment)
    _run([engine, "build", "--network", "host", "-t", IMAGE, str(ROOT)], {}, 600)
    compose.run("up", "-d")
    yield compose
    logs = "\n".join(
        subprocess.run(
            [engine, "logs", "--tail", "5", compose.name(service)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stderr
        for service in SERVICES
    )
    print(logs)
    compose.run("down", "-v")


def _wait(condition: object, what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.5)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=3) as answer:
            return bool(json.load(answer)["ready"])
    except (OSError, ValueError):
        return False


def test_the_published_ports_answer(compose: Compose) -> None:
    for port in ("ROUTER_PORT", "MANAGEMENT_PORT"):
        _wait(lambda port=port: _ready(compose.url(port)), f"readiness on {port}", 90)
    with urllib.request.urlopen(f"{compose.url('METRICS_PORT')}/metrics", timeout=5) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("service", [*SERVICES, "nats", "redis"])
def test_every_health_check_passes(compose: Compose, service: str) -> None:
    healthcheck = compose.inspect(service)["Config"]["Healthcheck"]["Test"]  # type: ignore[index]
    command = ["sh", "-c", healthcheck[1]] if healthcheck[0] == "CMD-SHELL" else healthcheck[1:]
    _wait(lambda: compose.inside(service, *command).returncode == 0, f"healthy {service}", 90)


@pytest.mark.parametrize("service", [*SERVICES, "nats", "redis", "engine-1", "metaservice"])
def test_containers_run_as_an_ordinary_user_on_a_read_only_root(compose: Compose, service: str) -> None:
    assert compose.inside(service, "id", "-u").stdout.strip() == "10001"
    written = compose.inside(service, "sh", "-c", "touch /usr/written")
    assert written.returncode != 0
    assert "Read-only" in written.stderr


def test_the_demos_load_ends_with_the_table_and_cache_aware_ahead(compose: Compose) -> None:
    _wait(lambda: compose.exit_code("load") is not None, "end of the load", 240)
    result = subprocess.run(
        [compose.engine, "logs", compose.name("load")], capture_output=True, text=True, timeout=60, check=False
    )
    assert "cache-aware placement vs round robin" in result.stdout + result.stderr
    assert compose.exit_code("load") == 0


def test_a_router_that_is_restarted_comes_back_with_its_registrations_and_blocks(compose: Compose) -> None:
    def workers() -> tuple[list[str], int]:
        with urllib.request.urlopen(f"{compose.url('ROUTER_PORT')}/workers", timeout=5) as answer:
            body = json.load(answer)
        return [worker["instance_id"] for worker in body["workers"]], body["indexer"][0]["total_blocks"]

    before = workers()
    assert {"engine-1", "engine-2", "engine-3", "memcache-pool"} <= set(before[0])
    assert before[1] > 0
    for action in ("stop", "start"):
        subprocess.run([compose.engine, action, compose.name("router")], capture_output=True, timeout=90, check=True)
    _wait(lambda: _ready(compose.url("ROUTER_PORT")), "router again", 60)
    assert workers() == before


def test_services_stop_within_their_grace_time(compose: Compose) -> None:
    for service in SERVICES:
        before = time.monotonic()
        subprocess.run([compose.engine, "stop", compose.name(service)], capture_output=True, timeout=60, check=True)
        assert time.monotonic() - before < 15
        assert compose.exit_code(service) == 0
