"""The embedded stack with real servers and real child processes."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import nats
import pytest
import redis.asyncio

from kvroute.embedded import EmbeddedStack, StackError, StackOptions
from kvroute.embedded.child import Child
from kvroute.embedded.servers import redis_command, start_server
from kvroute.embedded.supervised import Supervised
from services.runtime.config import ConfigError
from tests.conftest import ServerProcess, wait_for

DEADLINE_SECONDS = 30.0
SERVICES = ("ingest", "router")


async def until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def exists(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet reaped by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def options(**changes: object) -> StackOptions:
    return StackOptions(**{"any_ports": True, "services": SERVICES, **changes})  # type: ignore[arg-type]


async def test_everything_is_ready_inside_and_gone_afterwards() -> None:
    said: list[str] = []
    async with EmbeddedStack(options(), said.append) as stack:
        pids = stack.pids
        assert set(pids) == {"nats", "redis", *SERVICES}
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{stack.router_url}/readyz")).status_code == 200
        broker = await nats.connect(stack.nats_url)
        assert (await broker.jetstream().stream_info("KV_INDEX")).config.name == "KV_INDEX"
        await broker.close()
        store = redis.asyncio.from_url(stack.redis_url)
        assert await store.ping()
        await store.aclose()
    assert not any(map(exists, pids.values()))
    assert any(line.startswith("nats is up at nats://127.0.0.1:") for line in said)
    assert any(line.startswith("router is ready after ") for line in said)


async def test_a_killed_child_is_reported_and_started_again_under_the_same_address() -> None:
    said: list[str] = []
    async with EmbeddedStack(options(), said.append) as stack, httpx.AsyncClient(trust_env=False) as client:
        for name in ("router", "nats"):
            before = stack.pids[name]
            stack.child(name).kill()
            await until(lambda name=name, before=before: stack.pids.get(name, before) != before, f"new {name}")
            assert any(f"{name} was ended by SIGKILL; it is started again" in line for line in said)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{stack.router_url}/readyz")).status_code == 200:
                    break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_what_services_print_comes_line_by_line_with_their_names() -> None:
    lines: list[tuple[str, str]] = []
    async with EmbeddedStack(options(), on_line=lambda name, line: lines.append((name, line))):
        pass
    assert {name for name, _ in lines} == set(SERVICES)
    assert any("stopped" in line for name, line in lines if name == "router")


async def test_servers_that_run_already_are_used_and_left_alone(
    nats_server: ServerProcess, redis_server: ServerProcess
) -> None:
    said: list[str] = []
    given = options(nats_url=nats_server.url.replace("://", "://u:s3cret@"), redis_url=redis_server.url)
    async with EmbeddedStack(given, said.append) as stack:
        assert set(stack.pids) == set(SERVICES)
        assert f"nats is at nats://***@127.0.0.1:{nats_server.port}, not started here" in said
    assert not any("s3cret" in line for line in said)
    assert nats_server.process is not None
    assert nats_server.process.poll() is None


async def test_a_nats_named_in_the_configuration_counts_as_running_already(
    nats_server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"nats:\n  url: {nats_server.url}\n")
    async with EmbeddedStack(options(config_file=str(file))) as stack:
        assert stack.nats_url == nats_server.url
        assert set(stack.pids) == {"redis", *SERVICES}


async def test_a_data_folder_keeps_the_streams(tmp_path: Path) -> None:
    for expected in (0, 1):
        async with EmbeddedStack(options(data_dir=tmp_path)) as stack:
            broker = await nats.connect(stack.nats_url)
            js = broker.jetstream()
            assert (await js.stream_info("KV_EVENTS")).state.messages == expected
            await js.publish("kv.events.vllm.m.i.0", b"x")
            await broker.close()


async def test_a_wrong_configuration_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    file = tmp_path / "kvroute.yaml"
    file.write_text("router:\n  prot: 1\n")
    with pytest.raises(ConfigError, match=r"unknown key router\.prot"):
        async with EmbeddedStack(options(config_file=str(file))):
            pass


async def test_what_does_not_get_ready_in_time_is_named_with_its_reason_and_everything_is_stopped() -> None:
    stack = EmbeddedStack(options(nats_url="nats://127.0.0.1:1", services=("router",), start_timeout=10.0))
    with pytest.raises(StackError, match=r"(?s)not ready within 10 s.*router: .*nats: waiting for NATS"):
        await stack.__aenter__()
    assert stack.pids == {}


async def test_a_service_that_can_never_work_ends_the_stack_instead_of_being_started_again() -> None:
    failures: list[str] = []
    program = "import sys; print('unknown key x.y'); sys.exit(2)"
    child = Supervised("service", [sys.executable, "-c", program], None, print, on_final=failures.append)
    await child.start()
    await until(lambda: bool(failures), "failure")
    assert failures == ["service stopped with exit code 2\n  unknown key x.y"]
    assert child.restarts == 0
    await child.stop(1.0)


async def test_a_child_that_keeps_crashing_is_started_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.embedded.supervised.FIRST_WAIT_SECONDS", 0.1)
    said: list[str] = []
    child = Supervised("service", [sys.executable, "-c", "print('why'); raise SystemExit(1)"], None, said.append)
    await child.start()
    await until(lambda: child.restarts >= 3, "three restarts")
    await child.stop(1.0)
    waits = [line.rsplit("again in ", 1)[1] for line in said]
    assert waits[:3] == ["0.1 s", "0.2 s", "0.4 s"]
    assert said[0].startswith("  why\n")


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    child = await Child.start([sys.executable, "-c", program], None, lines.append)
    await until(lambda: lines == ["up"], "start")
    before = time.monotonic()
    assert not await child.stop(0.2)
    assert time.monotonic() - before < 5
    assert child.exit_code == -signal.SIGKILL


async def test_lines_of_any_length_and_encoding_are_read() -> None:
    program = (
        r"import sys; sys.stdout.buffer.write(b'\xff\n' + b'x' * 1_000_000 + b'\n\nlast'); sys.stderr.write('e\n')"
    )
    lines: list[str] = []
    child = await Child.start([sys.executable, "-c", program], None, lines.append)
    assert await child.wait() == 0
    assert "\ufffd" in lines
    assert sum(line.count("x") for line in lines) == 1_000_000
    assert "last" in lines[-1]


PARENT = """
import asyncio
from kvroute.embedded import EmbeddedStack, StackOptions

async def main():
    async with EmbeddedStack(StackOptions(any_ports=True, services=("ingest", "router"))) as stack:
        print(*stack.pids.values(), flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child's life to its parent's")
def test_no_process_is_left_when_the_parent_is_killed_with_kill_9() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(exists, pids))
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(map(exists, pids)), "end of the children", 5.0)


async def test_an_occupied_usual_port_is_replaced_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        occupied = listener.getsockname()[1]
        server, port = await start_server("redis", redis_command, occupied, tmp_path, False, said.append)
    assert said == [f"redis: port {occupied} is occupied, taking {port}"]
    await server.stop(5.0)
