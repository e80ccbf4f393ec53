"""How many blocks per second go from ZMQ messages into the router's index, and what each hop costs.

The whole stack runs embedded. Every publisher sends its events as fast as it can; the clock runs from the first message
until the last block is in the index. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence

import httpx
import zmq.asyncio

from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import FULL_ATTENTION, GPU, BlockStored, encode_batch

MODEL = "ingest-throughput"
BLOCK_SIZE = 16
GIVE_UP_SECONDS = 120.0
PROCESSES = {
    "ingest": "services.ingest",
    "matcher": "services.matcher",
    "router": "services.router",
    "nats": "nats-server",
    "redis": "redis-server",
    "valkey": "valkey-server",
}


def stored_batch(first_hash: int, blocks: int, source: random.Random) -> bytes:
    """A batch with one stored event of blocks that nobody has."""
    stored = BlockStored(
        block_hashes=list(range(first_hash, first_hash + blocks)),
        parent_block_hash=None,
        token_ids=[source.randrange(32_000) for _ in range(BLOCK_SIZE * blocks)],
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium=GPU,
        lora_name=None,
        extra_keys=[None] * blocks,
        group_idx=0,
        kv_cache_spec_kind=FULL_ATTENTION,
    )
    return encode_batch(time.time(), [stored], 0)


def cpu_seconds() -> dict[str, float]:
    """Processor time that each child process of this one has used so far."""
    command = ["ps", "-ww", "-o", "pid,args", "--ppid", str(os.getpid())]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    ticks = os.sysconf("SC_CLK_TCK")
    used = dict.fromkeys(PROCESSES, 0.0)
    for line in listing:
        pid, _, arguments = line.strip().partition(" ")
        for name, word in PROCESSES.items():
            if word in arguments:
                with open(f"/proc/{pid}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
                used[name] += (int(fields[11]) + int(fields[12])) / ticks
    return used


async def blocks_in_index(http: httpx.AsyncClient) -> int:
    """Blocks of the model's space, from /workers."""
    spaces = (await http.get("/workers")).json()["indexer"]
    return sum(space["total_blocks"] for space in spaces if space["model_name"] == MODEL)


async def send(publisher: EventPublisher, payloads: Sequence[bytes]) -> None:
    """Publish everything, letting the loop turn now and then."""
    for number, payload in enumerate(payloads):
        publisher.publish(payload)
        if number % 100 == 0:
            await asyncio.sleep(0)


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Start everything, measure, and give the figures. Raises TimeoutError when blocks are missing at the end."""
    context = zmq.asyncio.Context()
    source = random.Random(1)
    async with EmbeddedStack(StackOptions(any_ports=True)) as stack:
        publishers = [
            EventPublisher(context, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") for _ in range(options.publishers)
        ]
        bodies = [
            {
                "instance_id": f"engine-{number}",
                "type": "vLLM",
                "modelname": MODEL,
                "block_size": BLOCK_SIZE,
                "dp_rank": 0,
                "medium_endpoints": {"npu": publisher.endpoint},
                "replay_endpoint": publisher.replay_endpoint,
                "store_backend": options.store_backend,
            }
            for number, publisher in enumerate(publishers)
        ]
        await register(stack.router_url, bodies, print)
        await asyncio.gather(*(publisher.subscribed() for publisher in publishers))
        first_hashes = range(1, options.events * options.blocks, options.blocks)
        payloads = [stored_batch(first, options.blocks, source) for first in first_hashes]
        total = len(payloads) * options.blocks
        async with httpx.AsyncClient(base_url=stack.router_url, timeout=30.0, trust_env=False) as http:
            before, began = cpu_seconds(), time.perf_counter()
            shares = [payloads[number :: len(publishers)] for number in range(len(publishers))]
            await asyncio.gather(*(send(p, share) for p, share in zip(publishers, shares, strict=True)))
            while (seen := await blocks_in_index(http)) < total:
                if time.perf_counter() - began > GIVE_UP_SECONDS:
                    raise TimeoutError(f"{seen} of {total} blocks are in the index after {GIVE_UP_SECONDS} s")
                await asyncio.sleep(0.05)
            seconds, after = time.perf_counter() - began, cpu_seconds()
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)
    return {
        "benchmark": "ingest",
        "events": len(payloads),
        "blocks_per_event": options.blocks,
        "store_backend": options.store_backend,
        "blocks": total,
        "seconds": round(seconds, 2),
        "blocks_per_second": round(total / seconds),
        **{
            f"{name}_us_per_block": round((after[name] - before[name]) / total * 1e6, 2)
            for name in PROCESSES
            if after[name]
        },
    }


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=32, help="blocks of an event")
    parser.add_argument("--publishers", type=int, default=4)
    parser.add_argument("--store-backend", default="Memcache", help="None: no pool, so the matcher remembers less")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
