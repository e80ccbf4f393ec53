"""How the embedded NATS and Redis are run: on loopback, with their files in the stack's folder."""

import asyncio
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from kvroute.embedded.binaries import nats_server_binary, redis_server_binary
from kvroute.embedded.options import Say
from kvroute.embedded.ports import choose_port, free_port
from kvroute.embedded.supervised import Supervised

HOST = "127.0.0.1"
NATS_PORT = 4222
REDIS_PORT = 6379
ATTEMPTS = 3
LISTEN_SECONDS = 20.0
POLL_SECONDS = 0.01

ServerCommand = Callable[[int, Path], list[str]]


class ServerError(RuntimeError):
    """A server that does not come up; the text has its last lines."""


def nats_command(port: int, folder: Path) -> list[str]:
    """nats-server with JetStream."""
    where = ["--addr", HOST, "--port", str(port)]
    return [nats_server_binary(), *where, "--jetstream", "--store_dir", str(folder)]


def redis_command(port: int, folder: Path) -> list[str]:
    """Redis or Valkey with an append-only file, so that the matcher's waiting state survives a crash."""
    where = ["--bind", HOST, "--port", str(port), "--dir", str(folder)]
    return [redis_server_binary(), *where, "--save", "", "--appendonly", "yes", "--lazyfree-lazy-expire", "yes"]


def stream_max_bytes(folder: Path, wanted: int) -> int:
    """How much each stream may keep: as wanted, less where the disk is small (JetStream reserves it beforehand)."""
    return max(64 * 1024**2, min(wanted, shutil.disk_usage(folder).free // 8))


async def start_server(
    name: str, command: ServerCommand, usual_port: int, folder: Path, any_port: bool, say: Say
) -> tuple[Supervised, int]:
    """A server that accepts connections, and its port. Raises ServerError, BinaryMissingError, OSError."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    port = free_port(host=HOST) if any_port else choose_port(usual_port, host=HOST)
    if not any_port and port != usual_port:
        say(f"{name}: port {usual_port} is occupied, taking {port}")
    for attempt in range(1, ATTEMPTS + 1):
        server = Supervised(name, command(port, folder), None, say)
        await server.start()
        try:
            await _listening(server, port)
        except BaseException as error:
            await server.stop(1.0)
            if not isinstance(error, ServerError) or attempt == ATTEMPTS:
                raise
            # Somebody else may have taken the port in between.
            port = free_port(host=HOST)
        else:
            return server, port
    raise AssertionError("unreachable")


async def _listening(server: Supervised, port: int) -> None:
    deadline = asyncio.get_running_loop().time() + LISTEN_SECONDS
    while not accepts(HOST, port):
        if not server.running or asyncio.get_running_loop().time() > deadline:
            raise ServerError("\n".join([f"{server.name} does not start on port {port}", *server.last_lines]))
        await asyncio.sleep(POLL_SECONDS)


def accepts(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex((host, port)) == 0
