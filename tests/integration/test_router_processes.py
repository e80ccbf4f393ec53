"""`router --workers N`: several processes at one port, each answering the same, all gone at a stop."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from tests.conftest import ServerProcess, free_port

WORKERS = 2


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.05)


def ports_in_a_row() -> int:
    while True:
        port = free_port()
        if port + WORKERS < 65_536:
            return port


async def test_two_processes_share_a_port_and_end_together(nats_server: ServerProcess, tmp_path: Path) -> None:
    port = ports_in_a_row()
    environment = os.environ | {"KVROUTE_NATS__URL": nats_server.url, "KVROUTE_ROUTER__PORT": str(port)}
    log = tmp_path / "router.log"
    with log.open("wb") as lines:
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.router", "--workers", str(WORKERS), env=environment, stderr=lines
        )
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:

            async def ready() -> bool:
                try:
                    own = [await http.get(f"http://127.0.0.1:{port + k}/readyz") for k in range(1, WORKERS + 1)]
                except httpx.HTTPError:
                    return False
                return all(answer.status_code == 200 for answer in own)

            await until(ready, "readiness of both processes")
            body = {"model": "processes", "block_size": 4, "token_ids": [1, 2, 3, 4]}
            engine = {"instance_id": "e", "type": "vLLM", "modelname": "processes", "block_size": 4, "dp_rank": 0}
            registered = await http.post(
                f"http://127.0.0.1:{port}/register", json=engine | {"medium_endpoints": {"npu": "tcp://127.0.0.1:1"}}
            )
            assert registered.status_code in (200, 201), registered.text

            async def all_know() -> bool:
                urls = [f"http://127.0.0.1:{port + k}/query" for k in range(WORKERS + 1)]
                return {(await http.post(url, json=body)).status_code for url in urls} == {200}

            await until(all_know, "answer of every process")
            await http.post(f"http://127.0.0.1:{port}/unregister", json=engine)
        router.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.wait(), 15) == 0
    finally:
        if router.returncode is None:
            router.kill()
            await router.wait()
    async with httpx.AsyncClient(trust_env=False, timeout=1.0) as http:
        for k in range(WORKERS + 1):
            try:
                await http.get(f"http://127.0.0.1:{port + k}/livez")
            except httpx.ConnectError:
                continue
            raise AssertionError(f"somebody still answers at {port + k}\n{log.read_text()[-2000:]}")
