"""The index beside Dynamo's RadixTree binding on the same work, in one process pinned to one core.

Queries: tokens to depths of all workers, each of which holds a random part of the query's prefix. Dynamo takes a list
of tokens, kvroute their u32 buffer (`list` rows: kvroute from the same list). Events: stored chains that nobody has
(new) or that another worker has already (shared), and removals. Medians of interleaved rounds. The last line is one
JSON object.
"""

import argparse
import json
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

from dynamo._core import RadixTree, compute_block_hash_for_seq

from schemas.blocks import content_hashes, pack_hashes
from services.router.index.native import NativeIndex
from services.router.index.port import NPU, Candidate

BLOCK_SIZE = 16
DEPTHS = (64, 512, 4096)
WORKERS = (8, 64, 512)
EVENT_BLOCKS = (8, 32, 64)


def median_seconds(functions: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Seconds per call, by name: the median of rounds in which all take their turn."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            for _ in range(calls):
                function()
            samples[name].append((time.perf_counter() - began) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def stored_event(parent: int | None, hashes: list[int], tokens: list[int], number: int = 0) -> bytes:
    """Dynamo's form of a stored event."""
    blocks = [{"block_hash": h, "tokens_hash": t} for h, t in zip(hashes, tokens, strict=True)]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


def removed_event(hashes: list[int], number: int = 0) -> bytes:
    """Dynamo's form of a removal."""
    return json.dumps({"event_id": number, "data": {"removed": {"block_hashes": hashes}}, "dp_rank": 0}).encode()


def compare_queries(source: random.Random, rounds: int) -> dict[str, Any]:
    """Tokens to depths."""
    result: dict[str, Any] = {}
    for blocks in DEPTHS:
        tokens = [source.randrange(150_000) for _ in range(blocks * BLOCK_SIZE)]
        buffer = array("I", tokens).tobytes()
        contents = content_hashes(buffer, BLOCK_SIZE)
        for workers in WORKERS:
            index, tree = NativeIndex(), RadixTree()
            depths = [source.randint(1, blocks) for _ in range(workers)]
            for worker, depth in enumerate(depths, start=1):
                names = [source.getrandbits(63) for _ in range(depth)]
                part = contents[:depth]
                index.stored(worker, NPU, worker, pack_hashes(names), None, part.tobytes(), 0, worker, False)
                tree.apply_event(worker, stored_event(None, names, list(part)))
            candidates = tuple(Candidate(worker) for worker in range(1, workers + 1))
            packed = index.packed(candidates, frozenset())
            scores = tree.find_matches(compute_block_hash_for_seq(tokens, BLOCK_SIZE)).scores
            assert [scores[worker, 0] for worker in range(1, workers + 1)] == depths
            assert array("I", index.core.match_tokens(buffer, BLOCK_SIZE, 0, packed))[::5].tolist() == depths
            seconds = median_seconds(
                {
                    "dynamo": lambda tree=tree, tokens=tokens: (
                        tree.find_matches(compute_block_hash_for_seq(tokens, BLOCK_SIZE)).scores
                    ),
                    "kvroute": lambda index=index, packed=packed, buffer=buffer: index.core.match_tokens(
                        buffer, BLOCK_SIZE, 0, packed
                    ),
                    "list": lambda index=index, packed=packed, tokens=tokens: index.core.match_tokens(
                        array("I", tokens), BLOCK_SIZE, 0, packed
                    ),
                },
                rounds,
                max(1, 512 // blocks),
            )
            name = f"{blocks}_blocks_{workers}_workers"
            result[f"query_us_{name}"] = {key: round(value * 1e6, 2) for key, value in seconds.items()}
            result[f"query_ratio_{name}"] = round(seconds["dynamo"] / seconds["kvroute"], 2)
            result[f"query_from_list_ratio_{name}"] = round(seconds["dynamo"] / seconds["list"], 2)
            print(name, result[f"query_us_{name}"], "ratio", result[f"query_ratio_{name}"], flush=True)
    return result


def compare_events(source: random.Random, chains: int) -> dict[str, Any]:
    """Stores that are new and stores that others made before, then removals."""
    result: dict[str, Any] = {}
    for blocks in EVENT_BLOCKS:
        seconds: dict[str, list[float]] = {}
        for _ in range(5):
            index, tree = NativeIndex(), RadixTree()
            work = [
                ([source.getrandbits(63) for _ in range(blocks)], [source.getrandbits(63) for _ in range(blocks)])
                for _ in range(chains * 64 // blocks)
            ]
            ours = [(pack_hashes(names), pack_hashes(contents)) for names, contents in work]
            stored = [stored_event(None, names, contents, i) for i, (names, contents) in enumerate(work)]
            removed = [removed_event(names[::-1], i) for i, (names, _) in enumerate(work)]
            packed_removals = [pack_hashes(names[::-1]) for names, _ in work]
            for kind, worker in (("new", 1), ("shared", 2)):
                began = time.perf_counter()
                for event in stored:
                    tree.apply_event(worker, event)
                tree.find_matches([1])
                seconds.setdefault(f"dynamo_{kind}", []).append(time.perf_counter() - began)
                began = time.perf_counter()
                for names, contents in ours:
                    index.stored(worker, NPU, worker, names, None, contents, 0, worker, False)
                seconds.setdefault(f"kvroute_{kind}", []).append(time.perf_counter() - began)
            began = time.perf_counter()
            for event in removed:
                tree.apply_event(2, event)
            tree.find_matches([1])
            seconds.setdefault("dynamo_removed", []).append(time.perf_counter() - began)
            began = time.perf_counter()
            for names in packed_removals:
                index.removed(2, NPU, 2, names)
            seconds.setdefault("kvroute_removed", []).append(time.perf_counter() - began)
        total = len(work) * blocks
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        for kind, label in (("new", "store"), ("shared", "store"), ("removed", "remove")):
            name = f"{blocks}_blocks" + ("" if kind == "removed" else f"_{kind}")
            result[f"{label}_mblocks_per_s_{name}"] = {
                side: round(total / medians[f"{side}_{kind}"] / 1e6, 2) for side in ("dynamo", "kvroute")
            }
            result[f"{label}_ratio_{name}"] = round(medians[f"dynamo_{kind}"] / medians[f"kvroute_{kind}"], 2)
            print(
                label,
                name,
                result[f"{label}_mblocks_per_s_{name}"],
                "ratio",
                result[f"{label}_ratio_{name}"],
                flush=True,
            )
    return result


def main() -> None:
    """Run both sides and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="rounds per query (default %(default)s)")
    parser.add_argument("--chains", type=int, default=1000, help="chains of 64 blocks per run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    # Dynamo hands each call to another thread; on one core that costs it least.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    source = random.Random(arguments.seed)
    figures = compare_queries(source, arguments.rounds) | compare_events(source, arguments.chains)
    lowest = min(v for k, v in figures.items() if k.startswith("query_ratio_"))
    deep = min(v for k, v in figures.items() if k.startswith("query_ratio_4096"))
    print(json.dumps({"query_ratio_lowest": lowest, "query_ratio_4096_lowest": deep, **figures}))


if __name__ == "__main__":
    main()
