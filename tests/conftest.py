"""Real servers for tests: nats-server and Redis (or Valkey) as child processes, one of each per test session."""

import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nats
import pytest
from hypothesis import HealthCheck, settings
from nats.aio.client import Client

from kvroute.embedded.servers import accepts, nats_command, redis_command
from schemas.subjects import (
    CURSORS_BUCKET,
    DEAD_STREAM,
    EVENTS_STREAM,
    INDEX_STREAM,
    LEASE_BUCKET,
    LIVENESS_BUCKET,
    REGISTRY_BUCKET,
    SNAPSHOT_BUCKET,
    STREAMS_BUCKET,
)

# A busy machine makes examples slow; that says nothing about the code.
settings.register_profile("kvroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvroute")

START_SECONDS = 20.0
_PORTS_GIVEN: set[int] = set()


def free_port() -> int:
    """A TCP port that was free a moment ago and was not handed out before in this process."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _PORTS_GIVEN:
            _PORTS_GIVEN.add(port)
            return port


def wait_for(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Wait until the condition holds; fails the test with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.01)


def is_listening(port: int) -> bool:
    """Whether something accepts connections on the port."""
    return accepts("127.0.0.1", port)


@dataclass
class ServerProcess:
    """A server that a test may kill and start again on the same port and data folder."""

    command: list[str]
    port: int
    url: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it listens."""
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: is_listening(self.port), f"{self.command[0]} on port {self.port}")

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None

    def stop(self) -> None:
        """SIGTERM, then kill -9."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None


def make_nats_server(folder: Path) -> ServerProcess:
    """A nats-server with JetStream on a free port, not started."""
    port = free_port()
    return ServerProcess(nats_command(port, folder), port, f"nats://127.0.0.1:{port}")


def make_redis_server(folder: Path) -> ServerProcess:
    """A Redis server on a free port with an append-only file, not started."""
    port = free_port()
    return ServerProcess(redis_command(port, folder), port, f"redis://127.0.0.1:{port}/0")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A nats-server shared by the session; tests that kill it make their own (make_nats_server)."""
    server = make_nats_server(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A Redis server shared by the session; tests that kill it make their own (make_redis_server)."""
    server = make_redis_server(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def nats_client(nats_server: ServerProcess) -> AsyncIterator[Client]:
    """A client on a server without streams or buckets of earlier tests."""
    client = await nats.connect(nats_server.url)
    js = client.jetstream()
    for stream in await js.streams_info():
        if stream.config.name in {
            *(EVENTS_STREAM, INDEX_STREAM, DEAD_STREAM),
            *(f"KV_{bucket}" for bucket in (REGISTRY_BUCKET, LEASE_BUCKET, LIVENESS_BUCKET)),
            *(f"KV_{STREAMS_BUCKET}", f"KV_{CURSORS_BUCKET}"),
            f"OBJ_{SNAPSHOT_BUCKET}",
        }:
            await js.delete_stream(stream.config.name)
    yield client
    await client.close()
