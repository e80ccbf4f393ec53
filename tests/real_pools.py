"""Real memory pool services from the package index, in an environment of their own (made once, in a cache folder)."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("KVROUTE_TEST_CACHE", Path.home() / ".cache" / "kvroute-tests")) / "pools"
MEMCACHE = ("memcache-hybrid==1.3.0", "memfabric-hybrid==1.3.0")
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
INSTALL_SECONDS = 100

MOONCAKE_CLIENT = """\
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
store.put("key", b"x" * 1000)
print("stored", flush=True)
sys.stdin.read()
"""

META_SERVICE = """\
import sys
from memcache_hybrid import MetaConfig, MetaService
config = MetaConfig()
config.meta_service_url, config.config_store_url, config.metrics_url = sys.argv[1:4]
config.log_output_target = "screen"
MetaService.setup(config)
MetaService.main()
"""


def environment_with(*packages: str) -> Path:
    """The folder of a virtual environment with these packages alone; skips the test when it cannot be made."""
    folder = CACHE / ("-".join(packages).replace("==", "-") + f"-py{sys.version_info.major}.{sys.version_info.minor}")
    done = folder / "complete"
    if done.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return folder
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", *packages],
        ):
            try:
                made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"{' '.join(packages)} cannot be installed: {error}")
            if made.returncode:
                pytest.skip(f"{' '.join(packages)} cannot be installed: {made.stderr.strip()[-300:]}")
        done.touch()
    return folder


def memcache_meta_service(meta_port: int, store_port: int, metrics_port: int) -> list[str]:
    """The command that runs a real memcache MetaService."""
    python = environment_with(*MEMCACHE) / "bin" / "python"
    urls = (f"tcp://127.0.0.1:{meta_port}", f"tcp://127.0.0.1:{store_port}", f"http://127.0.0.1:{metrics_port}")
    return [str(python), "-c", META_SERVICE, *urls]


def mooncake_master(rpc_port: int, metrics_port: int) -> list[str]:
    """The command that runs a real mooncake_master."""
    found = sorted(environment_with(*MOONCAKE).glob("lib/python*/site-packages/mooncake/mooncake_master"))
    if not found:
        pytest.skip("the Mooncake package carries no mooncake_master")
    return [str(found[0]), "--rpc_port", str(rpc_port), "--metrics_port", str(metrics_port)]


def mooncake_client(rpc_port: int) -> list[str]:
    """The command that lends a 64 MiB segment to a master, stores one key of 1000 bytes, and waits for end of input."""
    return [str(environment_with(*MOONCAKE) / "bin" / "python"), "-c", MOONCAKE_CLIENT, f"127.0.0.1:{rpc_port}"]
