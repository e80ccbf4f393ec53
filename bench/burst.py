"""/query while a million blocks arrive: p50 and p99 with and without the burst, on the same stack.

Queries go on at a steady rate from a process of their own; publishers then send their events as fast as they can. The
last line is one JSON object. On a machine with few cores the burst also takes the processor away from the router and
from the client, so wall times say as much of the machine as of the router.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

import httpx
import zmq.asyncio

from bench.http_vs_dynamo import Request
from bench.ingest import blocks_in_index, send, stored_batch
from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register

MODEL = "ingest-throughput"
BLOCK_SIZE = 16
GIVE_UP_SECONDS = 120.0


async def query_at_rate(port: int, request: Request, rate: float, stop: asyncio.Event) -> list[float]:
    """Seconds of each query, sent at fixed times; one that is late counts from when it was due."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = []
    began = time.perf_counter()
    while not stop.is_set():
        due = began + len(taken) / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        writer.write(request.data)
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        await reader.readexactly(size)
        taken.append(time.perf_counter() - due)
    writer.close()
    return taken


def summary(taken: list[float]) -> dict[str, float]:
    """Milliseconds."""
    taken = sorted(taken)
    return {
        "queries": len(taken),
        "p50_ms": round(statistics.median(taken) * 1e3, 2),
        "p99_ms": round(taken[len(taken) * 99 // 100] * 1e3, 2),
        "max_ms": round(taken[-1] * 1e3, 2),
    }


async def ask(port: int, rate: float) -> dict[str, float]:
    """Query until the input ends."""
    body = json.dumps({"model": MODEL, "block_size": BLOCK_SIZE, "token_ids": list(range(8192))}).encode()
    stop = asyncio.Event()
    asking = asyncio.create_task(query_at_rate(port, Request.post("/query", body, "application/json"), rate, stop))
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    return summary(await asking)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure quietly, then under the burst."""
    context = zmq.asyncio.Context()
    source = random.Random(1)
    async with EmbeddedStack(StackOptions(any_ports=True)) as stack, httpx.AsyncClient(trust_env=False) as http:
        publishers = [EventPublisher(context, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") for _ in range(4)]
        bodies = [
            {
                "instance_id": f"engine-{number}",
                "type": "vLLM",
                "modelname": MODEL,
                "block_size": BLOCK_SIZE,
                "dp_rank": 0,
                "medium_endpoints": {"npu": publisher.endpoint},
                "replay_endpoint": publisher.replay_endpoint,
            }
            for number, publisher in enumerate(publishers)
        ]
        await register(stack.router_url, bodies, print)
        await asyncio.gather(*(publisher.subscribed() for publisher in publishers))
        payloads = [stored_batch(n * 32 + 1, 32, source) for n in range(options.blocks // 32)]
        http.base_url = httpx.URL(stack.router_url)
        port = int(stack.router_url.rpartition(":")[2])
        results = {}
        for name, sent in (("quiet", []), ("burst", payloads)):
            asking = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--ask", str(port), "--rate", str(options.rate)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            await asyncio.sleep(1.0)
            shares = [sent[number :: len(publishers)] for number in range(len(publishers))]
            await asyncio.gather(*(send(p, share) for p, share in zip(publishers, shares, strict=True)))
            began = time.perf_counter()
            while await blocks_in_index(http) < len(sent) * 32 or time.perf_counter() - began < 4.0:
                if time.perf_counter() - began > GIVE_UP_SECONDS:
                    raise TimeoutError("blocks are missing")
                await asyncio.sleep(0.2)
            output, _ = await asking.communicate(b"")
            results[name] = json.loads(output)
            print(name, results[name], flush=True)
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)
    return {"benchmark": "burst", "blocks": len(payloads) * 32, **results}


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=200.0, help="queries per second (default %(default)s)")
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(ask(options.ask, options.rate) if options.ask else run(options))))


if __name__ == "__main__":
    main()
