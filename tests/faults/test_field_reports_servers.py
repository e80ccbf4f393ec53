"""Faults reported from the field around NATS: servers that die, freeze and come back, with services as processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from schemas.blocks import Tier, pack_hashes
from schemas.events import WIRE_VERSION, EventBatch, Stored, decode_index_batch, encode
from schemas.registry import EngineRecord
from schemas.subjects import INDEX_STREAM, events_subject
from services.runtime.registry_store import RegistryStore
from tests.conftest import ServerProcess, free_port, make_nats_server, make_redis_server

PORTS = {
    "ingest": ("KVROUTE_INGEST__PORT",),
    "matcher": ("KVROUTE_MATCHER__PORT",),
    "router": ("KVROUTE_ROUTER__PORT",),
    "coordinator": (
        *("KVROUTE_COORDINATOR__MANAGEMENT_PORT", "KVROUTE_COORDINATOR__INFERENCE_PORT"),
        "KVROUTE_COORDINATOR__METRICS_PORT",
    ),
}
GRACE_SECONDS = 3.0


class Site:
    """Servers and services as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("nats", "redis"):
            (folder / name).mkdir()
        self.nats = make_nats_server(folder / "nats")
        self.redis = make_redis_server(folder / "redis")
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}

    def start(self, *services: str, **environment: str) -> None:
        self.nats.start()
        self.redis.start()
        for name in services:
            ports = {variable: str(free_port()) for variable in PORTS[name]}
            self.urls[name] = f"http://127.0.0.1:{ports[PORTS[name][0]]}"
            variables = {"KVROUTE_NATS__URL": self.nats.url, "KVROUTE_REDIS__URL": self.redis.url} | ports | environment
            with (self.folder / f"{name}.log").open("wb") as log:
                self.services[name] = subprocess.Popen(
                    [sys.executable, "-m", f"services.{name}"], env=os.environ | variables, stdout=log, stderr=log
                )

    async def ready(self, name: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False) as http:
                return bool((await http.get(f"{self.urls[name]}/readyz", timeout=2)).json()["ready"])
        return False

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self.services.values():
            process.kill()
            process.wait()
        for server in (self.nats, self.redis):
            server.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.stop()


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.05)


def freeze(server: ServerProcess) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)


def thaw(server: ServerProcess) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGCONT)


async def register(client: Client) -> None:
    """Events of an engine that nobody registered are discarded; with memory storage the registry dies too."""
    engine = EngineRecord(instance_id="a", model="m", block_size=4, generation=1)
    while True:
        try:
            await RegistryStore(client.jetstream()).put(engine)
            return
        except (NatsError, TimeoutError):
            await asyncio.sleep(0.1)


async def publish(client: Client, number: int) -> None:
    """One engine batch with one block; repeated until the server takes it."""
    stored = Stored(Tier.NPU, pack_hashes([number]), None, pack_hashes([number + 1000]), 0, 4)
    batch = EventBatch(WIRE_VERSION, "engine", "m", "default", "a", 0, 1, number, number, 0.0, time.time(), [stored])
    while True:
        try:
            await client.jetstream().publish(events_subject("engine", "m", "a", 0), encode(batch), timeout=1)
            return
        except (NatsError, TimeoutError):
            await asyncio.sleep(0.1)


async def indexed(client: Client) -> set[int]:
    js = client.jetstream()
    found = set()
    with contextlib.suppress(NatsError, TimeoutError):
        state = (await js.stream_info(INDEX_STREAM)).state
        for sequence in range(state.first_seq, state.last_seq + 1) if state.messages else ():
            for group in decode_index_batch((await js.get_msg(INDEX_STREAM, sequence)).data or b"").groups:
                names = [getattr(event, "engine_hashes", b"") for event in group.events]
                found |= {int.from_bytes(name[:8], "little") for name in names if name}
    return found


@pytest.mark.parametrize("storage", ["file", "memory"])
async def test_na_01_the_matcher_goes_on_after_the_server_was_killed(site: Site, storage: str) -> None:
    site.start("matcher", KVROUTE_NATS__STORAGE=storage, KVROUTE_MATCHER__LEASE_TTL="2")
    await until(lambda: site.ready("matcher"), "readiness")
    client = await nats.connect(site.nats.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    await register(client)
    await publish(client, 1)

    async def there(numbers: set[int]) -> bool:
        return numbers <= await indexed(client)

    await until(lambda: there({1}), "first block")
    site.nats.kill()

    async def notices() -> bool:
        return not await site.ready("matcher")

    await until(notices, "notice of the death")
    await asyncio.to_thread(site.nats.start)
    await register(client)
    for number in range(11, 21):
        await publish(client, number)
    await until(lambda: there(set(range(11, 21))), "blocks published after the restart")
    await until(lambda: site.ready("matcher"), "readiness afterwards")
    await client.close()


async def test_na_03_services_stop_in_their_grace_time_while_the_server_is_frozen(site: Site) -> None:
    site.start(*PORTS, KVROUTE_RUNTIME__SHUTDOWN_GRACE=str(GRACE_SECONDS))
    for name in PORTS:
        await until(lambda name=name: site.ready(name), f"readiness of {name}")  # type: ignore[misc]
    client = await nats.connect(site.nats.url)
    for number in range(50):
        await publish(client, number)
    freeze(site.nats)
    began = time.monotonic()
    for process in site.services.values():
        process.send_signal(signal.SIGTERM)
    for name, process in site.services.items():
        code = await asyncio.to_thread(process.wait, 20)
        took = time.monotonic() - began
        assert code == 0, f"{name} ended with {code}:\n{site.log(name)}"
        assert took < GRACE_SECONDS + 2, f"{name} took {took:.1f} s:\n{site.log(name)}"
        assert "Traceback" not in site.log(name)
    thaw(site.nats)
    await client.close()


async def test_na_03_everything_works_again_after_a_thaw(site: Site) -> None:
    site.start("matcher", "router")
    for name in ("matcher", "router"):
        await until(lambda name=name: site.ready(name), f"readiness of {name}")  # type: ignore[misc]
    client = await nats.connect(site.nats.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    await register(client)
    freeze(site.nats)
    await asyncio.sleep(4.0)
    async with httpx.AsyncClient(base_url=site.urls["router"], trust_env=False) as http:
        body = {"model": "m", "block_size": 4, "token_ids": [1, 2, 3, 4]}
        began = time.monotonic()
        assert (await http.post("/query", json=body)).status_code in (200, 404)
        assert time.monotonic() - began < 1.0
    thaw(site.nats)
    for number in range(1, 11):
        await publish(client, number)

    async def all_there() -> bool:
        return set(range(1, 11)) <= await indexed(client)

    await until(all_there, "blocks after the thaw")
    await client.close()
