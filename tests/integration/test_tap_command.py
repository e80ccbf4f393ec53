"""``kvroute tap`` against a real NATS server."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from schemas.events import StateNote, encode
from schemas.subjects import state_subject
from tests.conftest import ServerProcess, free_port

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 20.0


STARTED: list[asyncio.subprocess.Process] = []


@pytest.fixture(autouse=True)
async def nothing_stays() -> AsyncIterator[None]:
    """A test that fails half-way leaves no process behind."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "tap", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    STARTED.append(process)
    return process


async def publish_until_it_ends(client: Client, notes: list[StateNote], tap: asyncio.subprocess.Process) -> list[str]:
    """Publish the notes over and over (core NATS keeps nothing for late listeners); the lines printed."""

    async def publish() -> None:
        while True:
            for note in notes:
                await client.publish(state_subject(note.state, note.model), encode(note))
            await asyncio.sleep(0.05)

    publishing = asyncio.create_task(publish())
    output, error = await asyncio.wait_for(tap.communicate(), DEADLINE_SECONDS)
    publishing.cancel()
    assert tap.returncode == 0, error
    return output.decode().splitlines()


async def test_only_the_chosen_state_and_model_are_printed_as_json_lines(
    nats_server: ServerProcess, nats_client: Client
) -> None:
    notes = [
        StateNote("matched", "org/a.1", blocks=2, medium="cpu"),
        StateNote("matched", "b", blocks=3),
        StateNote("dropped", "org/a.1", reason="block_size_mismatch"),
    ]
    tap = await start(
        *("--nats-url", nats_server.url, "--state", "matched", "--model", "org/a.1", "--json", "--count", "3")
    )
    lines = [json.loads(line) for line in await publish_until_it_ends(nats_client, notes, tap)]
    assert [(line["state"], line["model"], line["blocks"]) for line in lines] == [("matched", "org/a.1", 2)] * 3


async def test_plain_lines_show_every_state_without_colours(nats_server: ServerProcess, nats_client: Client) -> None:
    notes = [StateNote("queued", "a", blocks=1), StateNote("dropped", "b", reason="unknown_medium")]
    tap = await start("--nats-url", nats_server.url, "--plain", "--count", "2")
    lines = await publish_until_it_ends(nats_client, notes, tap)
    assert "queued" in " ".join(lines)
    assert "reason=unknown_medium" in " ".join(lines)
    assert "\x1b" not in "".join(lines)


async def test_a_body_that_is_no_note_is_said_and_the_rest_goes_on(
    nats_server: ServerProcess, nats_client: Client
) -> None:
    tap = await start("--nats-url", nats_server.url, "--json", "--count", "2")

    async def publish() -> None:
        while True:
            await nats_client.publish("kv.state.matched.m", b"\xc1")
            await nats_client.publish("kv.state.matched.m", encode(StateNote("matched", "m")))
            await asyncio.sleep(0.05)

    publishing = asyncio.create_task(publish())
    output, error = await asyncio.wait_for(tap.communicate(), DEADLINE_SECONDS)
    publishing.cancel()
    assert b"not a state note: kv.state.matched.m" in error
    assert len(output.splitlines()) == 2


async def test_ctrl_c_ends_it_quietly(nats_server: ServerProcess, nats_client: Client) -> None:
    tap = await start("--nats-url", nats_server.url, "--json")
    assert tap.stdout is not None
    line = asyncio.create_task(tap.stdout.readline())
    while not line.done():
        await nats_client.publish("kv.state.matched.m", encode(StateNote("matched", "m")))
        await asyncio.sleep(0.05)
    tap.send_signal(signal.SIGINT)
    _, error = await asyncio.wait_for(tap.communicate(), DEADLINE_SECONDS)
    assert (tap.returncode, error) == (0, b"")


async def test_a_missing_server_is_named() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    tap = await start("--nats-url", url)
    _, error = await asyncio.wait_for(tap.communicate(), DEADLINE_SECONDS)
    assert tap.returncode == 1
    assert url.encode() in error
    assert b"Traceback" not in error


@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "nats://", "nats://user:s3cret@host:0"])
async def test_an_address_that_is_no_nats_server_is_refused_at_once_without_its_password(url: str) -> None:
    tap = await start("--nats-url", url)
    _, error = await asyncio.wait_for(tap.communicate(), DEADLINE_SECONDS)
    assert tap.returncode == 2
    assert b"is not a NATS server" in error.replace(b"\n", b" ").replace(b"  ", b" ")
    assert b"s3cret" not in error


async def test_one_of_several_servers_is_enough(nats_server: ServerProcess, nats_client: Client) -> None:
    tap = await start("--nats-url", f"nats://127.0.0.1:{free_port()}, {nats_server.url}", "--json", "--count", "1")
    assert len(await publish_until_it_ends(nats_client, [StateNote("matched", "m")], tap)) == 1
