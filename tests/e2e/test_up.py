"""``kvroute up`` as a person uses it: started, called, stopped, and shot."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest

from kvroute.embedded.ports import free_port
from tests.conftest import wait_for

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 25.0
CHILDREN = 6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def configuration(**changes: int) -> str:
    """A file's text that gives every service a free port, so that tests beside this one do not meet."""
    ports = {name: free_port() for name in ("router", "ingest", "matcher", "inference", "management", "metrics")}
    ports |= changes
    return (
        f"router: {{port: {ports['router']}}}\ningest: {{port: {ports['ingest']}}}\n"
        f"matcher: {{port: {ports['matcher']}}}\ncoordinator: {{inference_port: {ports['inference']}, "
        f"management_port: {ports['management']}, metrics_port: {ports['metrics']}}}\n"
    )


class Up:
    """A running ``kvroute up``."""

    def __init__(self, folder: Path, text: str, *more: str) -> None:
        file = folder / "kvroute.yaml"
        file.write_text(text)
        self.output = folder / "output"
        self._sink: IO[bytes] = self.output.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvroute", "up", "--config", str(file), *more],
            cwd=ROOT,
            stdout=self._sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text(errors="replace")

    def wait_until_up(self) -> dict[str, str]:
        """The addresses it prints, by name."""
        wait_for(lambda: "kvroute is up" in self.text() or self.process.poll() is not None, "start", START_SECONDS)
        assert self.process.poll() is None, self.text()
        page = self.text().split("kvroute is up", 1)[1].splitlines()
        found = {}
        for line in page:
            if "  http://" in line or " http://" in line:
                name, _, rest = line.strip().partition(" http://")
                found[name.strip()] = "http://" + rest.split()[0]
        return found

    def children(self) -> list[int]:
        """Process ids of its children."""
        folder = Path(f"/proc/{self.process.pid}/task")
        return [int(pid) for task in folder.iterdir() for pid in (task / "children").read_text().split()]

    def close(self) -> None:
        """Whatever happened in the test, nothing stays."""
        self.process.kill()
        self.process.wait()
        self._sink.close()


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path, configuration())
    yield running
    running.close()


def test_it_prints_addresses_that_answer_and_ctrl_c_stops_everything(up: Up) -> None:
    addresses = up.wait_until_up()
    children = up.children()
    assert len(children) == CHILDREN
    for name in ("router", "management", "ingest", "matcher"):
        assert httpx.get(f"{addresses[name]}/readyz", trust_env=False).json()["ready"] is True
    assert httpx.get(f"{addresses['router']}/workers", trust_env=False).json()["workers"] == []
    assert httpx.get(f"{addresses['OpenAI API']}/models", trust_env=False).json()["data"] == []
    # What a terminal does: the whole foreground group is told, children lead groups of their own.
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.process.wait(STOP_SECONDS) == 0
    assert up.text().rstrip().endswith("stopped")
    assert "killed" not in up.text()
    assert "Traceback" not in up.text()
    assert not any(map(exists, children))


def test_services_stop_before_the_servers_they_need(up: Up) -> None:
    up.wait_until_up()
    up.process.terminate()
    assert up.process.wait(STOP_SECONDS) == 0
    after = up.text().split("stopping; once more stops at once", 1)[1]
    for service in ("router", "matcher", "ingest", "coordinator"):
        assert any(line.startswith(service) and '"stopped"' in line for line in after.splitlines()), after
    assert "waiting_for" not in after
    assert "lost" not in after


def test_kill_9_leaves_no_process_behind(up: Up) -> None:
    up.wait_until_up()
    children = up.children()
    assert len(children) == CHILDREN
    up.process.kill()
    up.process.wait()
    wait_for(lambda: not any(map(exists, children)), "end of the children", 5.0)


def test_a_second_signal_stops_at_once(up: Up) -> None:
    up.wait_until_up()
    children = up.children()
    for pid in children:
        os.kill(pid, signal.SIGSTOP)
    up.process.terminate()
    wait_for(lambda: "stopping" in up.text(), "answer to the first signal")
    before = time.monotonic()
    up.process.terminate()
    up.process.wait(STOP_SECONDS)
    assert time.monotonic() - before < 5
    assert not any(map(exists, children))


def test_a_signal_during_the_start_stops_what_was_started(up: Up) -> None:
    wait_for(lambda: "redis is up" in up.text(), "redis")
    children = up.children()
    up.process.terminate()
    assert up.process.wait(STOP_SECONDS) == 0
    assert not any(map(exists, children))


def test_an_occupied_port_is_replaced_and_said(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        occupied = listener.getsockname()[1]
        up = Up(tmp_path, configuration(router=occupied))
        try:
            addresses = up.wait_until_up()
            assert f"router: port {occupied} (HTTP API) is occupied, taking" in up.text()
            assert not addresses["router"].endswith(f":{occupied}")
            assert httpx.get(f"{addresses['router']}/readyz", trust_env=False).status_code == 200
        finally:
            up.close()


def test_a_crashed_service_is_reported_and_comes_back(up: Up) -> None:
    addresses = up.wait_until_up()
    victim = next(
        pid for pid in up.children() if b"services.router" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: "router was ended by SIGKILL; it is started again" in up.text(), "report")

    def answers() -> bool:
        try:
            return httpx.get(f"{addresses['router']}/readyz", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(answers, "router")


def test_a_wrong_configuration_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    up = Up(tmp_path, "router: {prot: 1}\n")
    assert up.process.wait(START_SECONDS) == 2
    up.close()
    assert "unknown key router.prot, did you mean port?" in up.text()
    assert "is up" not in up.text()
