"""The pinned index workload: 256 holders, chains shared by 1, 8 or 64 of them, holes, repeats, misses.

Constants as published with SMG's radix-tree crate; its figures stand beside ours as orientation: they are native calls
on another machine, ours are whole calls from Python. Every holder hashes alike (`same`: one name per block, as with a
shared pool) or on its own (`own`). The last line is one JSON object.
"""

import argparse
import json
import math
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.blocks import pack_hashes, prefix_keys
from services.router.index.native import NativeIndex
from services.router.index.port import NPU, Candidate

HOLDERS = 256
BATCH = 8
SHARING = ((0.50, 1), (0.35, 8), (0.15, 64))
PUBLISHED = {
    "bytes_per_holder_block": 26.9,
    "single_holder_lookup_p50_ns": 292,
    "worst_cell_p99_us": 7.6,
    "million_blocks_written_per_s": 4.6,
}


@dataclass
class Chain:
    """A shared prefix. contents: content hashes; holders: who has it; names: per holder, or one for all."""

    contents: array
    holders: list[int]
    names: dict[int, array]


def draw_chains(holder_blocks: int, naming: str, source: random.Random) -> Iterator[Chain]:
    """Chains until so many (holder, block) memberships are drawn."""
    drawn = 0
    while drawn < holder_blocks:
        depth = round(math.exp(source.uniform(math.log(8), math.log(512))))
        share, sharing = source.random(), 64
        for part, number in SHARING:
            if share < part:
                sharing = number
                break
            share -= part
        holders = source.sample(range(1, HOLDERS + 1), sharing)
        contents = array("Q", [source.getrandbits(64) for _ in range(depth)])
        common = array("Q", [source.getrandbits(64) for _ in range(depth)])
        names = {
            holder: common if naming == "same" else array("Q", [source.getrandbits(64) for _ in range(depth)])
            for holder in holders
        }
        drawn += depth * sharing
        yield Chain(contents, holders, names)


def write(index: NativeIndex, chains: list[Chain], source: random.Random) -> tuple[float, int]:
    """Store everything in batches of 8, 5 % of them twice, then cut holes; seconds of the stores, and blocks stored."""
    calls = []
    for chain in chains:
        packed = chain.contents.tobytes()
        for holder in chain.holders:
            names = chain.names[holder].tobytes()
            for start in range(0, len(chain.contents), BATCH):
                cut = slice(8 * start, 8 * (start + BATCH))
                parent = chain.names[holder][start - 1] if start else None
                call = (holder, NPU, holder, names[cut], parent, packed[cut], 0, holder, False)
                calls += [call] * (2 if source.random() < 0.05 else 1)
    stored, blocks = index.core.stored, sum(len(call[3]) // 8 for call in calls)
    began = time.perf_counter()
    for call in calls:
        stored(*call)
    seconds = time.perf_counter() - began
    for chain in chains:
        if source.random() < 0.2:
            place = source.randrange(1, len(chain.contents) - 1)
            for holder in chain.holders:
                index.removed(holder, NPU, holder, pack_hashes([chain.names[holder][place]]))
    return seconds, blocks


def look_up(index: NativeIndex, chains: list[Chain], source: random.Random, queries: int) -> dict[str, float]:
    """Nanoseconds per look-up by keys: of one holder in a chain of its own, and of 64 holders at depth 78 or so."""
    everyone = index.packed(tuple(Candidate(holder) for holder in range(1, HOLDERS + 1)), frozenset())
    single, shared, missed = [], [], []
    for _ in range(queries):
        chain = source.choice(chains)
        tail = [source.getrandbits(64) for _ in range(source.randint(4, 64))]
        miss = source.random() < 0.2
        keys = prefix_keys(array("Q", tail) if miss else chain.contents + array("Q", tail)).tobytes()
        one = index.core.candidates(array("I", chain.holders[:1]), array("I"), array("I", [0]), array("I"))
        who = one if len(chain.holders) == 1 else everyone
        began = time.perf_counter_ns()
        index.core.match(keys, who)
        taken = time.perf_counter_ns() - began
        if miss:
            missed.append(taken)
        elif len(chain.holders) == 1:
            single.append(taken / len(chain.contents))
        elif len(chain.holders) == 64 and 60 <= len(chain.contents) <= 100:
            shared.append(taken)
    figures = {}
    for name, values in (
        ("single_holder_ns_per_block", single),
        ("depth_78_64_holders_ns", shared),
        ("miss_ns", missed),
    ):
        values.sort()
        if values:
            figures[f"{name}_p50"] = round(values[len(values) // 2], 1)
            figures[f"{name}_p99"] = round(values[min(len(values) - 1, len(values) * 99 // 100)], 1)
    return figures


def main() -> None:
    """Run all sizes and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holder-blocks", type=int, nargs="+", default=[1_280_000, 12_800_000])
    parser.add_argument("--queries", type=int, default=20_000)
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "pinned", "published": PUBLISHED}
    for size in options.holder_blocks:
        for naming in ("own", "same"):
            source = random.Random(size)
            index = NativeIndex(max_blocks=1 << 40)
            seconds = blocks = 0.0
            chains = []
            portion: list[Chain] = []
            for chain in draw_chains(size, naming, source):
                chains.append(chain)
                portion.append(chain)
                if len(portion) == 500:
                    taken, stored = write(index, portion, source)
                    seconds, blocks, portion = seconds + taken, blocks + stored, []
            taken, stored = write(index, portion, source)
            seconds, blocks = seconds + taken, blocks + stored
            stats = index.stats()
            figures = {
                "holder_blocks": stats.memberships,
                "bytes_per_holder_block": round(stats.bytes / stats.memberships, 2),
                "million_blocks_written_per_s": round(blocks / seconds / 1e6, 2),
                **look_up(index, chains, source, options.queries),
            }
            result[f"{size}_{naming}"] = figures
            print(size, naming, figures, flush=True)
            del chains, index
    print(json.dumps(result))


if __name__ == "__main__":
    main()
