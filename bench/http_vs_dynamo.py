"""/query beside Dynamo's HTTP indexer: the same engines' events, the same tokens, one process each.

Simulated publishers send chains over ZMQ to both. Then each side answers queries over four kept connections; CPU per
request is that of the answering process with all its threads, with its idle use taken off. The client's own cost does
not count. The last line is one JSON object; ratios are Dynamo's CPU over kvroute's.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import zmq.asyncio

from kvroute.embedded import EmbeddedStack, StackOptions
from kvroute.embedded.ports import free_port
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.registration import register
from kvroute.sim.vllm_events import FULL_ATTENTION, GPU, BlockStored, encode_batch

MODEL = "http-comparison"
BLOCK_SIZE = 16
LENGTHS = {"8k": 8_192, "128k": 131_072, "1m": 1_000_000}
WAIT_SECONDS = 60.0
CONNECTIONS = 4


def cpu_seconds(pid: int) -> float:
    """Processor time of a process with all its threads, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@dataclass
class Request:
    """An HTTP request as bytes, ready to be sent."""

    data: bytes

    @classmethod
    def post(cls, path: str, body: bytes, content_type: str) -> "Request":
        """A POST on a connection that stays open."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        return cls(head.encode() + body)


async def ask_together(port: int, request: Request, times: int) -> list[float]:
    """The same over several connections at once."""
    results = await asyncio.gather(*(ask(port, request, times // CONNECTIONS) for _ in range(CONNECTIONS)))
    return [seconds for taken, _ in results for seconds in taken]


async def ask(port: int, request: Request, times: int) -> tuple[list[float], bytes]:
    """Send a request so many times over one connection; seconds of each, and the last answer's body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    taken = []
    body = b""
    for _ in range(times):
        began = time.perf_counter()
        writer.write(request.data)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = await reader.readexactly(size)
        taken.append(time.perf_counter() - began)
    writer.close()
    return taken, body


async def measure(port: int, pid: int, request: Request, times: int) -> dict[str, float]:
    """CPU per request, p50 and p99, in microseconds."""
    await ask(port, request, max(3, times // 10))
    idle_before, idle_began = cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(0.5)
    idle = (cpu_seconds(pid) - idle_before) / (time.perf_counter() - idle_began)
    before, began = cpu_seconds(pid), time.perf_counter()
    taken = await ask_together(port, request, times)
    times = len(taken)
    used = cpu_seconds(pid) - before - idle * (time.perf_counter() - began)
    taken.sort()
    return {
        "cpu_us": round(used / times * 1e6, 1),
        "p50_us": round(statistics.median(taken) * 1e6, 1),
        "p99_us": round(taken[min(len(taken) - 1, int(len(taken) * 0.99))] * 1e6, 1),
    }


def chain_events(tokens: list[int], hashes: list[int], blocks: int) -> list[bytes]:
    """Batches of 32 blocks that store the first blocks of the prompt, under hashes that all engines agree on.

    Dynamo loses the second batch of a worker that hashes otherwise than the first one did.
    """
    hashes = hashes[:blocks]
    payloads = []
    for start in range(0, blocks, 32):
        part = hashes[start : start + 32]
        stored = BlockStored(
            block_hashes=list(part),
            parent_block_hash=hashes[start - 1] if start else None,
            token_ids=tokens[start * BLOCK_SIZE : (start + len(part)) * BLOCK_SIZE],
            block_size=BLOCK_SIZE,
            lora_id=None,
            medium=GPU,
            lora_name=None,
            extra_keys=[None] * len(part),
            group_idx=0,
            kv_cache_spec_kind=FULL_ATTENTION,
        )
        payloads.append(encode_batch(time.time(), [stored], 0))
    return payloads


async def until(what: str, check: Any) -> None:
    """Wait for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not await check():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        await asyncio.sleep(0.05)


def requests_of(tokens: list[int]) -> dict[str, Request]:
    """kvroute's encodings of one query, and Dynamo's."""
    packed = array("I", tokens).tobytes()
    fields = {"model": MODEL, "block_size": BLOCK_SIZE}
    query = f"/query?model={MODEL}&block_size={BLOCK_SIZE}"
    return {
        "json": Request.post("/query", orjson.dumps({**fields, "token_ids": tokens}), "application/json"),
        "msgpack": Request.post("/query", msgpack.packb({**fields, "token_ids": packed}), "application/msgpack"),
        "raw": Request.post(query, packed, "application/octet-stream"),
        "dynamo": Request.post("/query", orjson.dumps({"model_name": MODEL, "token_ids": tokens}), "application/json"),
    }


async def compare(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides with so many workers."""
    source = random.Random(workers)
    context = zmq.asyncio.Context()
    port = free_port()
    arguments = ["-m", "dynamo.indexer", "--port", str(port), "--threads", "1", "--block-size", str(BLOCK_SIZE)]
    dynamo = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    publishers = [EventPublisher(context, "tcp://127.0.0.1:0") for _ in range(workers)]
    try:
        async with EmbeddedStack(StackOptions(any_ports=True)) as stack, httpx.AsyncClient(trust_env=False) as http:
            bodies = [
                {
                    "instance_id": f"engine-{number}",
                    "type": "vLLM",
                    "modelname": MODEL,
                    "block_size": BLOCK_SIZE,
                    "dp_rank": 0,
                    "medium_endpoints": {"npu": publisher.endpoint},
                }
                for number, publisher in enumerate(publishers)
            ]
            await register(stack.router_url, bodies, print)
            for number, publisher in enumerate(publishers):
                body = {
                    "instance_id": number,
                    "endpoint": publisher.endpoint,
                    "model_name": MODEL,
                    "block_size": BLOCK_SIZE,
                }
                (await http.post(f"http://127.0.0.1:{port}/register", json=body)).raise_for_status()
            await asyncio.gather(*(publisher.subscribed() for publisher in publishers))
            await asyncio.sleep(2.0)  # Dynamo's subscriptions cannot be told from ours
            tokens = {name: [source.randrange(150_000) for _ in range(length)] for name, length in LENGTHS.items()}
            whole = LENGTHS["8k"] // BLOCK_SIZE
            depths = [source.randint(1, whole) for _ in publishers]
            depths[0] = whole
            hashes = [source.getrandbits(62) for _ in range(whole)]
            for publisher, depth in zip(publishers, depths, strict=True):
                for payload in chain_events(tokens["8k"], hashes, depth):
                    publisher.publish(payload)
            requests = requests_of(tokens["8k"])
            router_port = int(stack.router_url.rpartition(":")[2])

            async def ours_complete() -> bool:
                answer = orjson.loads((await ask(router_port, requests["json"], 1))[1])["default"]
                return [answer[f"engine-{n}"]["DP"]["0"]["npu_blocks"] for n in range(workers)] == depths

            async def theirs_complete() -> bool:
                scores = orjson.loads((await ask(port, requests["dynamo"], 1))[1])["scores"]
                return [scores.get(str(n), {}).get("0", 0) // BLOCK_SIZE for n in range(workers)] == depths

            await until("kvroute has every block", ours_complete)
            await until("Dynamo has every block", theirs_complete)
            rounds: dict[str, list[dict[str, float]]] = {}
            for _ in range(options.rounds):
                for name, request in requests.items():
                    side = (port, dynamo.pid) if name == "dynamo" else (router_port, stack.pids["router"])
                    rounds.setdefault(name, []).append(await measure(*side, request, options.requests))
            figures: dict[str, Any] = {
                f"{name}_8k": {key: statistics.median(r[key] for r in results) for key in results[0]}
                for name, results in rounds.items()
            }
            for length in ("128k", "1m") if workers == options.workers[0] else ():
                for name, request in requests_of(tokens[length]).items():
                    side = (port, dynamo.pid) if name == "dynamo" else (router_port, stack.pids["router"])
                    try:
                        figures[f"{name}_{length}"] = await measure(*side, request, options.requests // 20)
                    except (AssertionError, OSError, asyncio.IncompleteReadError) as error:
                        figures[f"{name}_{length}"] = {"refused": str(error)[:80]}
            return figures
    finally:
        dynamo.kill()
        for publisher in publishers:
            await publisher.close()
        context.destroy(linger=0)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of workers."""
    result: dict[str, Any] = {"benchmark": "http_vs_dynamo"}
    for workers in options.workers:
        figures = await compare(workers, options)
        for name, value in figures.items():
            print(f"{workers} workers, {name}: {value}", flush=True)
            result[f"{name}_{workers}_workers"] = value
        peer = figures["dynamo_8k"]["cpu_us"]
        for name in ("json", "msgpack", "raw"):
            result[f"query_ratio_{name}_{workers}_workers"] = round(peer / figures[f"{name}_8k"]["cpu_us"], 2)
    return result


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--requests", type=int, default=1000, help="per round and encoding (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
