"""Whether every process keeps its memory while hours of events pass at full speed.

Simulated engines with full caches store new chains and remove the oldest ones; the whole stack runs embedded. The times
and sizes after which matcher and NATS forget are shortened, so that what would expire in two hours of life expires
here. After a warm-up, in which nats-server fills its caches, memory (the resident set without mapped files) is looked
at after every hundredth of the way, each time everything sent is in the index. A process is flat when its peak in the
second half is less than ``--limit`` percent, or 4 MB, above that in the first half (peaks, because nats-server collects
its garbage in long waves of some 30 MB). The last line is one JSON object.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import zmq.asyncio

from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import GPU, BlockRemoved, BlockStored, EngineEvent, encode_batch

MODEL, BLOCK_SIZE, BLOCKS = "memory-flat", 16, 4
STEPS = 100
IN_FLIGHT = 500
GIVE_UP_SECONDS = 60.0
STREAM_BYTES = 16 * 1024**2
ALWAYS_FLAT_BYTES = 4_000_000
SECONDS_OF_LIFE = {
    "MATCHER__PENDING_TTL": 60.0,
    "MATCHER__CONTENT_TTL": 300.0,
    "MATCHER__OFFLOAD_TTL": 600.0,
    "NATS__DUPLICATE_WINDOW": 120.0,
}


class Engine:
    """One engine rank whose cache is full from the start: every batch stores a new chain and removes the oldest."""

    def __init__(self, name: str, context: "zmq.asyncio.Context", chains: int, source: random.Random) -> None:
        self.name = name
        self.publisher = EventPublisher(context, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", buffer_steps=1000)
        self._held: deque[int] = deque()
        self._chains = chains
        self._source = source
        self._names = itertools.count(1, BLOCKS)

    def registration(self) -> dict[str, Any]:
        """The body of its registration."""
        body = {"instance_id": self.name, "type": "vLLM", "modelname": MODEL, "block_size": BLOCK_SIZE, "dp_rank": 0}
        body |= {"medium_endpoints": {"npu": self.publisher.endpoint}, "store_backend": "Memcache"}
        return body | {"replay_endpoint": self.publisher.replay_endpoint}

    def act(self) -> None:
        """Publish one batch."""
        first = next(self._names)
        self._held.append(first)
        events: list[EngineEvent] = [
            BlockStored(
                block_hashes=list(range(first, first + BLOCKS)),
                parent_block_hash=None,
                token_ids=self._source.choices(range(32_000), k=BLOCK_SIZE * BLOCKS),
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium=GPU,
                lora_name=None,
            )
        ]
        if len(self._held) > self._chains:
            oldest = self._held.popleft()
            events.append(BlockRemoved(block_hashes=list(range(oldest, oldest + BLOCKS)), medium=GPU))
        self.publisher.publish(encode_batch(time.time(), events, 0))


def resident(pid: int) -> int:
    """Resident memory of a process in bytes, without the pages of files that the system may take back (NATS maps its
    streams)."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if ":" in line
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


async def until_applied(http: httpx.AsyncClient, engines: list[Engine]) -> int:
    """Blocks in the index, once everything that was published is in it. Raises TimeoutError."""
    expected = {engine.name: engine.publisher.sequence - 1 for engine in engines}
    ends = time.monotonic() + GIVE_UP_SECONDS
    while True:
        body = (await http.get("/workers")).json()
        found = {worker["instance_id"]: worker["endpoints"]["0"]["last_seq"] for worker in body["workers"]}
        if found == expected:
            return sum(int(space["total_blocks"]) for space in body["indexer"])
        if time.monotonic() > ends:
            raise TimeoutError(f"the index is at {found}, {expected} was sent")
        await asyncio.sleep(0.01)


async def replay(http: httpx.AsyncClient, engines: list[Engine], batches: int) -> None:
    """Publish as fast as they are taken; no more are on their way than every buffer has room for."""
    for number in range(batches):
        engines[number % len(engines)].act()
        if number % IN_FLIGHT == IN_FLIGHT - 1:
            await until_applied(http, engines)


def growth(samples: list[int]) -> int:
    """By how many bytes the second half's peak lies above the first half's."""
    half = len(samples) // 2
    return max(samples[half:]) - max(samples[:half])


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Replay, look at memory, and give the figures."""
    batches = round(options.hours * 3600 * options.rate)
    warm_up = round(options.warm_up_hours * 3600 * options.rate)
    faster = options.hours * 3600 / options.expected_seconds
    environment = {f"KVROUTE_{name}": f"{max(0.5, life / faster):.3f}" for name, life in SECONDS_OF_LIFE.items()}
    environment |= {"KVROUTE_NATS__STREAM_MAX_BYTES": str(STREAM_BYTES), "KVROUTE_ROUTER__SNAPSHOT_INTERVAL": "5"}
    context = zmq.asyncio.Context()
    source = random.Random(1)
    samples: dict[str, list[int]] = {}
    async with EmbeddedStack(StackOptions(any_ports=True, environment=environment), print) as stack:
        engines = [Engine(f"engine-{n}", context, options.chains, source) for n in range(options.engines)]
        await register(stack.router_url, [engine.registration() for engine in engines], print)
        await asyncio.gather(*(engine.publisher.subscribed() for engine in engines))
        async with httpx.AsyncClient(base_url=stack.router_url, timeout=30.0, trust_env=False) as http:
            print(f"warming up with {warm_up} batches", file=sys.stderr)
            await replay(http, engines, warm_up)
            began = time.perf_counter()
            for step in range(STEPS):
                await replay(http, engines, batches * (step + 1) // STEPS - batches * step // STEPS)
                blocks = await until_applied(http, engines)
                for name, pid in stack.pids.items():
                    samples.setdefault(name, []).append(resident(pid))
                if step % 10 == 9:
                    sizes = ", ".join(f"{name} {values[-1] / 1e6:.0f}" for name, values in sorted(samples.items()))
                    print(f"{step + 1} %: {blocks} blocks; MB: {sizes}", file=sys.stderr)
            seconds = time.perf_counter() - began
        for engine in engines:
            await engine.publisher.close()
    context.destroy(linger=0)
    processes = {}
    for name, values in sorted(samples.items()):
        grown = growth(values)
        flat = grown < max(values[0] * options.limit / 100, ALWAYS_FLAT_BYTES)
        processes[name] = {
            "megabytes": round(values[-1] / 1e6, 1),
            "peak_growth_megabytes": round(grown / 1e6, 2),
            "flat": flat,
        }
    return {
        "benchmark": "memory_flat",
        "hours": options.hours,
        "batches": batches,
        "seconds": round(seconds, 1),
        "batches_per_second": round(batches / seconds),
        "blocks": blocks,
        "processes": processes,
        "flat": all(process["flat"] for process in processes.values()),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="of life that the events stand for")
    parser.add_argument("--warm-up-hours", type=float, default=3.0, help="before memory is looked at")
    parser.add_argument("--rate", type=float, default=40.0, help="batches per second of life, over all engines")
    parser.add_argument("--expected-seconds", type=float, default=60.0, help="how long it takes, for the waiting times")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--chains", type=int, default=2000, help="chains that an engine's cache holds")
    parser.add_argument("--limit", type=float, default=10.0, help="percent of growth")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
