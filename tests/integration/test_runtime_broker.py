"""The connection to NATS against servers that are late, killed, frozen, or that refuse."""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from nats.aio.client import Client
from nats.errors import OutboundBufferLimitError

from services.runtime.broker import PENDING_BYTES, connect_nats, ensure_streams
from services.runtime.health import Health
from services.runtime.logging import configure_logging
from services.runtime.settings import LoggingSettings, NatsSettings
from tests.conftest import ServerProcess, make_nats_server

DEADLINE_SECONDS = 20.0


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logging("test", LoggingSettings(format="json"), stream)
    yield stream
    structlog.reset_defaults()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """A server of the test's own, running."""
    own = make_nats_server(tmp_path)
    await asyncio.to_thread(own.start)
    yield own
    await asyncio.to_thread(own.stop)


@contextlib.asynccontextmanager
async def connected(settings: NatsSettings, health: Health | None = None) -> AsyncIterator[Client]:
    client = await asyncio.wait_for(connect_nats(settings, "test", health), DEADLINE_SECONDS)
    try:
        yield client
    finally:
        await client.close()


async def until(condition: object, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "condition not reached"
        await asyncio.sleep(0.01)


def events(stream: io.StringIO) -> list[str]:
    return [json.loads(line)["event"] for line in stream.getvalue().splitlines()]


async def test_waiting_for_a_server_is_said_once_with_the_reason_and_without_the_password(
    tmp_path: Path, log: io.StringIO
) -> None:
    server = make_nats_server(tmp_path)
    settings = NatsSettings(url=server.url.replace("://", "://me:s3cret@"))
    connecting = asyncio.create_task(connect_nats(settings, "test", Health("test")))
    await until(lambda: "waiting_for_nats" in events(log))
    await asyncio.sleep(1.0)
    await asyncio.to_thread(server.start)
    client = await asyncio.wait_for(connecting, DEADLINE_SECONDS)
    await client.close()
    await asyncio.to_thread(server.stop)
    assert events(log) == ["waiting_for_nats", "nats_connected"]
    assert "s3cret" not in log.getvalue()
    assert "Connect call failed" in json.loads(log.getvalue().splitlines()[0])["error"]


async def test_na_01_a_server_killed_twice_costs_nothing_but_the_time_it_is_away(server: ServerProcess) -> None:
    health = Health("test")
    received: list[bytes] = []

    async def receive(message: object) -> None:
        received.append(message.data)  # type: ignore[attr-defined]

    async with connected(NatsSettings(url=server.url), health) as client:
        await client.subscribe("subject", cb=receive)
        for body in (b"first", b"second"):
            await asyncio.to_thread(server.kill)
            await until(lambda: not health.ready)
            await asyncio.to_thread(server.start)
            await until(lambda: health.ready)
            await client.publish("subject", body)
            await until(lambda body=body: body in received)


@pytest.mark.parametrize("noticed", [False, True])
async def test_na_03_a_frozen_server_meets_a_bounded_buffer_and_after_the_thaw_all_goes_on(
    server: ServerProcess, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unnoticed, publishing waits; once pings go unanswered, what exceeds the buffer is refused."""
    if noticed:
        monkeypatch.setattr("services.runtime.broker.PING_SECONDS", 0.1)
    received: set[int] = set()
    refused: set[int] = set()
    sent: set[int] = set()

    async def receive(message: object) -> None:
        received.add(int.from_bytes(message.data[:2], "big"))  # type: ignore[attr-defined]

    async def publish_all(client: Client) -> None:
        for number in range(100):
            try:
                await client.publish("subject", number.to_bytes(2, "big") + bytes(900_000))
                sent.add(number)
            except OutboundBufferLimitError:
                refused.add(number)

    health = Health("test")
    async with connected(NatsSettings(url=server.url), health) as client:
        await client.subscribe("subject", cb=receive)
        await client.flush()
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        try:
            if noticed:
                await until(lambda: not health.ready)
            publishing = asyncio.create_task(publish_all(client))
            if noticed:
                await asyncio.wait_for(publishing, DEADLINE_SECONDS)
            else:
                done, _ = await asyncio.wait({publishing}, timeout=0.5)
                assert not done
            assert client.pending_data_size <= PENDING_BYTES + 1_000_000
        finally:
            server.process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(publishing, DEADLINE_SECONDS)
        await until(lambda: health.ready)
        await client.publish("subject", b"\xff\xff after the thaw")
        await until(lambda: 0xFFFF in received)
        assert sent | refused == set(range(100))
        assert received >= sent
        assert bool(refused) == noticed


async def test_a_stream_that_exists_keeps_its_messages_when_it_is_ensured_again(nats_client: Client) -> None:
    js = nats_client.jetstream()
    await ensure_streams(js, NatsSettings())
    await js.publish("kv.events.vllm.m.i.0", b"x", headers={"Nats-Msg-Id": "1"})
    repeated = await js.publish("kv.events.vllm.m.i.0", b"x", headers={"Nats-Msg-Id": "1"})
    await ensure_streams(js, NatsSettings(stream_max_age=3600))
    assert repeated.duplicate
    assert (await js.stream_info("KV_EVENTS")).state.messages == 1


REFUSED_LATER = """
import asyncio, contextlib, sys
from services.runtime.broker import connect_nats
from services.runtime.service import run_service

@contextlib.asynccontextmanager
async def start(config, health):
    client = await connect_nats(config.nats, "test", health)
    print("up", flush=True)
    yield
    await client.close()

sys.exit(run_service("router", start, []))
"""


async def test_a_process_that_the_server_refuses_for_good_ends_so_that_a_new_one_can_try() -> None:
    refuse = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576}\r\n')
        while b"PING" not in await reader.readline():
            pass
        writer.write(b"PONG\r\n")
        await refuse.wait()
        writer.write(b"-ERR 'User Authentication Expired'\r\n")
        await writer.drain()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", REFUSED_LATER),
        env=os.environ | {"KVROUTE_NATS__URL": f"nats://127.0.0.1:{port}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS) == b"up\n"
    refuse.set()
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    listener.close()
    assert process.returncode == 1
    assert b"user authentication expired" in errors.lower()
