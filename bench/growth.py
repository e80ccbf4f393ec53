"""How the index grows: the longest pause of a store on the way to 10 million blocks, and what a query costs by depth,
by number of workers and by size of the index. --plot FILE draws it. The last line is one JSON object.

Pauses are taken in processor time of the calling thread, because this says what the index does and not what else the
machine does; the longest in wall time stands beside.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.router.index.native import NativeIndex
from services.router.index.port import NPU, Candidate

BLOCK_SIZE = 16
EVENT_BLOCKS = 32


def random_hashes(source: np.random.Generator, count: int) -> bytes:
    """So many random u64 values, packed."""
    return source.integers(0, 1 << 63, count, dtype=np.uint64).tobytes()


def grow(blocks: int, source: np.random.Generator) -> tuple[NativeIndex, dict[str, Any]]:
    """An index of unique blocks, and the pauses on the way."""
    index = NativeIndex(max_blocks=1 << 40)
    stored = index.core.stored
    longest = longest_wall = 0
    seconds = 0.0
    for _ in range(blocks // (EVENT_BLOCKS * 1000)):
        width = 8 * EVENT_BLOCKS
        names, contents = (random_hashes(source, EVENT_BLOCKS * 1000) for _ in range(2))
        for start in range(0, width * 1000, width):
            wall, began = time.perf_counter_ns(), time.thread_time_ns()
            stored(1, NPU, 1, names[start : start + width], None, contents[start : start + width], 0, 1, False)
            taken = time.thread_time_ns() - began
            longest_wall = max(longest_wall, time.perf_counter_ns() - wall)
            longest = max(longest, taken)
            seconds += taken / 1e9
    stats = index.stats()
    return index, {
        "blocks": stats.blocks,
        "bytes_per_block": round(stats.bytes / stats.blocks, 1),
        "longest_store_ms": round(longest / 1e6, 3),
        "longest_store_wall_ms": round(longest_wall / 1e6, 3),
        "ns_per_block": round(seconds / stats.blocks * 1e9, 1),
    }


def query_us(index: NativeIndex, tokens: bytes, workers: int, first: int, rounds: int = 15) -> float:
    """Microseconds of a query, the median of rounds."""
    packed = index.packed(tuple(Candidate(first + worker) for worker in range(workers)), frozenset())
    calls = max(1, 400_000 // len(tokens))
    samples = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            index.core.match_tokens(tokens, BLOCK_SIZE, 0, packed)
        samples.append((time.perf_counter() - began) / calls * 1e6)
    return round(statistics.median(samples), 2)


def add_workers(index: NativeIndex, tokens: bytes, workers: int, first: int, source: np.random.Generator) -> None:
    """Workers that hold random parts of the prompt."""
    from schemas.blocks import content_hashes

    contents = content_hashes(tokens, BLOCK_SIZE)
    for worker in range(workers):
        depth = int(source.integers(1, len(contents) + 1)) if worker else len(contents)
        names = random_hashes(source, depth)
        holder = first + worker
        index.stored(holder, NPU, holder, names, None, contents[:depth].tobytes(), 0, holder, False)


def prompt(source: np.random.Generator, blocks: int) -> bytes:
    """Tokens of so many blocks."""
    return source.integers(0, 150_000, blocks * BLOCK_SIZE, dtype=np.uint32).tobytes()


def main() -> None:
    """Measure, plot, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--plot", type=Path, help="write a PNG (needs matplotlib)")
    options = parser.parse_args()
    source = np.random.default_rng(1)
    depths, workers = [16, 64, 256, 1024, 4096], [1, 8, 64, 256, 512]
    sizes = [size for size in (32_000, 320_000, 3_200_000, 10_000_000) if size <= options.blocks]
    by_depth, by_workers, by_size = {}, {}, {}
    index = NativeIndex()
    first = 1
    for depth in depths:
        tokens = prompt(source, depth)
        add_workers(index, tokens, 64, first, source)
        by_depth[depth] = query_us(index, tokens, 64, first)
        first += 64
    tokens = prompt(source, 512)
    for number in workers:
        index = NativeIndex()
        add_workers(index, tokens, number, 1, source)
        by_workers[number] = query_us(index, tokens, number, 1)
    growth: dict[str, Any] = {}
    for size in sizes:
        index, growth = grow(size, source)
        # Prompts all over the index, so that their blocks are in no cache when they are asked for.
        prompts = [prompt(source, 512) for _ in range(100)]
        for number, tokens in enumerate(prompts):
            add_workers(index, tokens, 8, 100 + 8 * number, source)
        packed = [
            index.packed(tuple(Candidate(100 + 8 * number + worker) for worker in range(8)), frozenset())
            for number in range(len(prompts))
        ]
        samples = []
        for _ in range(15):
            began = time.perf_counter()
            for tokens, who in zip(prompts, packed, strict=True):
                index.core.match_tokens(tokens, BLOCK_SIZE, 0, who)
            samples.append((time.perf_counter() - began) / len(prompts) * 1e6)
        by_size[size] = round(statistics.median(samples), 2)
        print(f"{size} blocks: {growth}, query of 512 blocks {by_size[size]} us", flush=True)
    if options.plot:
        draw(options.plot, by_depth, by_workers, by_size)
    result = {"benchmark": "growth", **growth, "query_us_by_depth": by_depth, "query_us_by_workers": by_workers}
    print(json.dumps({**result, "query_us_by_size": by_size}))


def draw(path: Path, by_depth: dict[int, float], by_workers: dict[int, float], by_size: dict[int, float]) -> None:
    """The three curves side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for place, (label, values) in enumerate(
        (
            ("blocks of the query (64 workers)", by_depth),
            ("workers (512 blocks)", by_workers),
            ("blocks in the index (512 blocks, 8 workers)", by_size),
        ),
        start=1,
    ):
        axes = figure.add_subplot(1, 3, place)
        axes.plot(list(values), list(values.values()), marker="o")
        axes.set_xscale("log")
        axes.set_ylim(0, max(values.values()) * 1.1)
        axes.set_xlabel(label)
        axes.set_ylabel("microseconds per query")
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
