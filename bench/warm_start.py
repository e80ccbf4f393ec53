"""How soon a restarted router is ready with a large index: from the last snapshot, and from the stream alone.

A real nats-server holds the stream; router processes are started and stopped as in production. The clock runs from
the start of the process to its first 200 on /readyz, which means that everything the stream held when it joined is
applied. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import nats
from nats.js import JetStreamContext

from kvroute.embedded.ports import free_port
from kvroute.embedded.servers import HOST, nats_command, start_server
from schemas.blocks import Tier
from schemas.events import WIRE_VERSION, IndexBatch, IndexGroup, IndexStored, Worker, encode
from schemas.registry import EngineRecord
from schemas.subjects import index_subject
from services.router.snapshot_store import SnapshotStore
from services.runtime.broker import ensure_streams
from services.runtime.registry_store import RegistryStore
from services.runtime.settings import NatsSettings

MODEL = "warm-start"
BLOCK_SIZE = 16
BLOCKS_PER_CHAIN = 512
ENGINES = 8
LIMIT_SECONDS = 5.0
GIVE_UP_SECONDS = 600.0
POLL_SECONDS = 0.01
COMPRESSED_SAMPLE = 16 * 1024 * 1024


async def fill(js: JetStreamContext, blocks: int, first: int, source: random.Random) -> int:
    """Publish stores of this many blocks of random content; the number behind the last group."""
    pending = []
    number = first
    for start in range(0, blocks, BLOCKS_PER_CHAIN):
        count = min(BLOCKS_PER_CHAIN, blocks - start)
        worker = Worker(f"engine-{number % ENGINES}", 0)
        names, contents = source.randbytes(8 * count), source.randbytes(8 * count)
        stored = IndexStored(worker, Tier.NPU, names, None, contents, 0, BLOCK_SIZE, True)
        group = IndexGroup(number, "engine", worker.instance_id, 0, 1, number, number, time.time(), [stored])
        body = encode(IndexBatch(WIRE_VERSION, MODEL, "default", [group], 1))
        pending.append(asyncio.create_task(js.publish(index_subject(MODEL, "default"), body)))
        number += 1
        if len(pending) >= 64:
            await asyncio.gather(*pending)
            pending.clear()
    await asyncio.gather(*pending)
    return number


class RouterProcess:
    """One router as a process. environment: settings beside the usual ones."""

    def __init__(self, nats_url: str, log: Path, **environment: str) -> None:
        self._port = free_port()
        self._log = log
        self._variables = {"KVROUTE_NATS__URL": nats_url, "KVROUTE_ROUTER__PORT": str(self._port), **environment}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Seconds until it is ready. Raises TimeoutError."""
        began = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.router"), env={**os.environ, **self._variables}, stderr=log
            )
        while not await asyncio.to_thread(self._ready):
            if time.perf_counter() - began > GIVE_UP_SECONDS:
                raise TimeoutError(f"the router was not ready within {GIVE_UP_SECONDS} s, see {self._log}")
            await asyncio.sleep(POLL_SECONDS)
        return time.perf_counter() - began

    async def stop(self) -> float:
        """Seconds until it has ended after SIGTERM, which includes its last snapshot."""
        assert self._process is not None
        began = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        return time.perf_counter() - began

    def blocks(self) -> int:
        """Blocks in its index."""
        with urllib.request.urlopen(f"http://{HOST}:{self._port}/workers", timeout=30) as answer:
            return sum(int(space["total_blocks"]) for space in json.load(answer)["indexer"])

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._port}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Fill the stream, start from it, stop, start from the snapshot; the figures."""
    source = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "router.log"
        server, port = await start_server("nats", nats_command, 0, Path(folder) / "nats", True, print)
        url = f"nats://{HOST}:{port}"
        client = await nats.connect(url)
        js = client.jetstream()
        try:
            await ensure_streams(js, NatsSettings(url=url))
            for number in range(ENGINES):
                record = EngineRecord(instance_id=f"engine-{number}", model=MODEL, block_size=BLOCK_SIZE, generation=1)
                await RegistryStore(js).put(record)
            print(f"publishing {options.blocks} blocks")
            following = await fill(js, options.blocks, 1, source)
            router = RouterProcess(url, log, KVROUTE_ROUTER__MAX_BLOCKS=str(2 * options.blocks))
            from_stream = await router.start()
            print(f"ready after {from_stream:.2f} s from the stream")
            stopped = await router.stop()
            await fill(js, options.tail, following, source)
            runs = []
            for _ in range(options.runs):
                runs.append(await router.start())
                print(f"ready after {runs[-1]:.2f} s from the snapshot and {options.tail} blocks of the stream")
                held = await asyncio.to_thread(router.blocks)
                await router.stop()
            (newest, *_) = await SnapshotStore(js).slots()
            body = await SnapshotStore(js).load(newest, 60)
            sample = body[:COMPRESSED_SAMPLE]
            began = time.perf_counter()
            packed = len(zlib.compress(sample, 1)) / len(sample)
            compression = len(body) / len(sample) * (time.perf_counter() - began)
        finally:
            if options.show_log:
                print(log.read_text())
            await client.close()
            await server.stop(5.0)
    return {
        "benchmark": "warm_start",
        "blocks": held,
        "ready_seconds": round(min(runs), 2),
        "ready_seconds_worst": round(max(runs), 2),
        "limit_seconds": LIMIT_SECONDS,
        "ready_seconds_from_stream": round(from_stream, 2),
        "stop_seconds_with_snapshot": round(stopped, 2),
        "snapshot_megabytes": round(len(body) / 1e6, 1),
        "zlib_ratio": round(packed, 3),
        "zlib_seconds": round(compression, 2),
    }


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    parser.add_argument("--tail", type=int, default=20_000, help="blocks stored after the snapshot")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--show-log", action="store_true", help="what the routers logged")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
