"""How long a block takes from a ZMQ message to an answer of POST /query, under a steady stream of batches.

The whole stack runs embedded. Publishers send ``--rate`` batches per second in all; every ``--sample-every``-th is
asked for, over and over, until the router knows its block. The last line is one JSON object.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from array import array
from collections.abc import Sequence

import httpx
import zmq.asyncio

from kvroute.demo.results import percentile
from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import FULL_ATTENTION, GPU, BlockStored, encode_batch

MODEL = "event-latency"
BLOCK_SIZE = 16
BLOCKS_PER_BATCH = 4
GIVE_UP_SECONDS = 5.0
MEDIAN_LIMIT_MS = 20.0
P99_LIMIT_MS = 60.0


def batch_of(tokens: Sequence[int], first_hash: int) -> bytes:
    """A batch with one stored event of BLOCKS_PER_BATCH blocks."""
    stored = BlockStored(
        block_hashes=[first_hash + number for number in range(BLOCKS_PER_BATCH)],
        parent_block_hash=None,
        token_ids=list(tokens),
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium=GPU,
        lora_name=None,
        extra_keys=[None] * BLOCKS_PER_BATCH,
        group_idx=0,
        kv_cache_spec_kind=FULL_ATTENTION,
    )
    return encode_batch(time.time(), [stored], 0)


async def until_visible(client: httpx.AsyncClient, tokens: Sequence[int], sent_at: float) -> float:
    """Seconds from sending to the first answer that has all blocks of a batch. Raises TimeoutError."""
    body = array("I", tokens).tobytes()
    url = f"/query?model={MODEL}&block_size={BLOCK_SIZE}"
    while True:
        response = await client.post(url, content=body, headers={"content-type": "application/octet-stream"})
        now = time.perf_counter()
        if response.status_code == httpx.codes.OK:
            instances = response.json()["default"].values()
            if any(instance["longest_matched"] == len(tokens) for instance in instances):
                return now - sent_at
        if now - sent_at > GIVE_UP_SECONDS:
            raise TimeoutError(f"a block was not visible within {GIVE_UP_SECONDS} s")


async def measure(router_url: str, publishers: Sequence[EventPublisher], options: argparse.Namespace) -> list[float]:
    """Send at the given rate and sample; seconds per sample."""
    source = random.Random(1)
    hashes = itertools.count(1, BLOCKS_PER_BATCH)
    samples: list[asyncio.Task[float]] = []
    async with httpx.AsyncClient(base_url=router_url, timeout=10.0, trust_env=False) as client:
        began = time.perf_counter()
        for number in range(round(options.rate * options.seconds)):
            delay = began + number / options.rate - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tokens = [source.randrange(32_000) for _ in range(BLOCK_SIZE * BLOCKS_PER_BATCH)]
            payload = batch_of(tokens, next(hashes))
            sent_at = time.perf_counter()
            publishers[number % len(publishers)].publish(payload)
            if number % options.sample_every == 0:
                samples.append(asyncio.create_task(until_visible(client, tokens, sent_at)))
        return list(await asyncio.gather(*samples))


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Start everything, measure, and give the figures."""
    context = zmq.asyncio.Context()
    async with EmbeddedStack(StackOptions(any_ports=True)) as stack:
        publishers = [EventPublisher(context, "tcp://127.0.0.1:0") for _ in range(options.publishers)]
        try:
            bodies = [
                {
                    "instance_id": f"engine-{number}",
                    "type": "vLLM",
                    "modelname": MODEL,
                    "block_size": BLOCK_SIZE,
                    "dp_rank": 0,
                    "medium_endpoints": {"npu": publisher.endpoint},
                    "store_backend": "Memcache",
                }
                for number, publisher in enumerate(publishers)
            ]
            await register(stack.router_url, bodies, print)
            await asyncio.gather(*(publisher.subscribed() for publisher in publishers))
            warm_up = argparse.Namespace(**{**vars(options), "seconds": 1.0})
            await measure(stack.router_url, publishers, warm_up)
            seconds = await measure(stack.router_url, publishers, options)
        finally:
            for publisher in publishers:
                await publisher.close()
            context.destroy(linger=0)
    milliseconds = [value * 1000 for value in seconds]
    return {
        "benchmark": "event_latency",
        "batches_per_second": options.rate,
        "blocks_per_batch": BLOCKS_PER_BATCH,
        "publishers": options.publishers,
        "samples": len(milliseconds),
        "median_ms": round(statistics.median(milliseconds), 2),
        "p90_ms": round(percentile(milliseconds, 0.90), 2),
        "p99_ms": round(percentile(milliseconds, 0.99), 2),
        "max_ms": round(max(milliseconds), 2),
        "median_limit_ms": MEDIAN_LIMIT_MS,
        "p99_limit_ms": P99_LIMIT_MS,
    }


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="batches per second, over all publishers")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--publishers", type=int, default=4)
    parser.add_argument("--sample-every", type=int, default=10)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
