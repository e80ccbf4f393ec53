"""A simulated DP rank behaves as a real vLLM engine did: same events, same bytes, same cached tokens."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sim.block_hashes import hash_blocks, low64, none_hash
from kvroute.sim.engine_rank import EngineRank, RankSpec
from kvroute.sim.vllm_events import BlockRemoved, BlockStored, EngineEvent, encode_batch
from tests.captures import engine_capture

BLOCK_SIZE = 32
CAPTURED_NPU_BLOCKS = 23
CAPTURED_CPU_BLOCKS = 16


def replay_prompts(rank: EngineRank, prompts: list[dict[str, Any]]) -> tuple[list[list[EngineEvent]], list[int]]:
    batches, cached = [], []
    for prompt in prompts:
        if prompt["phase"] == "after_reset_small":
            assert rank.reset_prefix_cache()
        tokens, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
        run = rank.start(tokens, 2, hashes=rank.hash_prompt(tokens, salt, None), cache_salt=salt)
        assert run is not None
        cached.append((run.npu_hits + run.external_hits) * BLOCK_SIZE)
        batches.append(rank.step_events())
        rank.decode(run, prompt["output_token_ids"])
        batches.append(rank.step_events())
        rank.finish(run)
    return [batch for batch in batches if batch], cached


def test_events_equal_a_real_engines_byte_for_byte() -> None:
    capture = engine_capture("vllm-0.32.0_plain_int")
    batches, cached = replay_prompts(EngineRank(RankSpec(BLOCK_SIZE, CAPTURED_NPU_BLOCKS)), capture["prompts"])
    published = [bytes.fromhex(message["frames_hex"][2]) for message in capture["live"]]
    timestamps = [msgspec.msgpack.decode(payload)[0] for payload in published]
    assert [encode_batch(at, events, 0) for at, events in zip(timestamps, batches, strict=True)] == published
    assert cached == [prompt["num_cached_tokens"] for prompt in capture["prompts"]]


def test_own_cpu_tier_equals_a_real_offloading_connector_up_to_the_order_of_its_set() -> None:
    capture = engine_capture("vllm-0.32.0_offload")
    rank = EngineRank(RankSpec(BLOCK_SIZE, CAPTURED_NPU_BLOCKS, CAPTURED_CPU_BLOCKS))
    batches, cached = replay_prompts(rank, capture["prompts"])

    def comparable(events: Any) -> list[str]:
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(events))
        first_copy = next(
            (i for i, e in enumerate(plain) if (e["type"], e.get("medium")) == ("BlockStored", "CPU")), None
        )
        copies = sorted(map(str, plain[first_copy:])) if first_copy is not None else []
        return [*map(str, plain[:first_copy]), *copies]

    published = [msgspec.msgpack.decode(bytes.fromhex(message["frames_hex"][2]))[1] for message in capture["live"]]
    assert [comparable(batch) for batch in batches] == [comparable(events) for events in published]
    assert cached == [prompt["num_cached_tokens"] for prompt in capture["prompts"]]


def test_a_salted_prompt_hashes_apart_from_the_plain_one_from_its_first_block_on() -> None:
    tokens = list(range(8))
    plain = hash_blocks(tokens, 4, root=none_hash())
    salted = hash_blocks(tokens, 4, root=none_hash(), cache_salt="tenant-1")
    assert len(plain) == len(salted) == 2
    assert not set(plain) & set(salted)


def test_a_seed_makes_hashes_private() -> None:
    assert none_hash("0") != none_hash("1") != none_hash()


def test_two_equal_prompts_at_once_store_their_block_twice_and_lose_it_twice() -> None:
    """As in facts of a real engine: the second request computes what the first has not finished yet."""
    rank = EngineRank(RankSpec(4, 6))
    tokens = [1, 2, 3, 4, 5, 6, 7]
    hashes = rank.hash_prompt(tokens, None, None)
    first, second = (rank.start(tokens, 2, hashes=hashes) for _ in range(2))
    assert first is not None
    assert second is not None
    rank.decode(first, [8, 9])
    rank.decode(second, [8, 9])
    stored = Counter(h for e in rank.step_events() if isinstance(e, BlockStored) for h in e.block_hashes)
    filled_in_decode = low64(first.hashes[1])
    assert stored[filled_in_decode] == 2
    rank.finish(first)
    rank.finish(second)
    other = list(range(100, 123))
    assert rank.start(other, 1, hashes=rank.hash_prompt(other, None, None)) is not None
    removed = Counter(h for e in rank.step_events() if isinstance(e, BlockRemoved) for h in e.block_hashes)
    assert removed[filled_in_decode] == 2


def test_a_prompt_waits_while_others_use_the_blocks() -> None:
    rank = EngineRank(RankSpec(4, 4))
    running = rank.start([1, 2, 3, 4, 5], 4, hashes=rank.hash_prompt([1, 2, 3, 4, 5], None, None))
    assert running is not None
    late = [9] * 8
    hashes = rank.hash_prompt(late, None, None)
    assert rank.start(late, 1, hashes=hashes) is None
    rank.finish(running)
    assert rank.start(late, 1, hashes=hashes) is not None


def test_reset_is_refused_while_a_prompt_runs_and_tells_with_the_next_step() -> None:
    rank = EngineRank(RankSpec(4, 8))
    run = rank.start([1, 2, 3, 4, 5], 1, hashes=rank.hash_prompt([1, 2, 3, 4, 5], None, None))
    assert run is not None
    assert not rank.reset_prefix_cache()
    rank.finish(run)
    assert rank.reset_prefix_cache()
    assert rank.pool.cached_hashes == set()


def test_pool_connector_events_come_one_per_block_with_tokens_and_parent() -> None:
    rank = EngineRank(RankSpec(2, 8))
    tokens = [1, 2, 3, 4]
    run = rank.start(tokens, 1, hashes=rank.hash_prompt(tokens, None, None))
    assert run is not None
    rank.step_events()
    rank.pooled(run, [0, 1])
    first, second = rank.step_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.token_ids, first.medium) == (None, [1, 2], "cpu")
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[0], [3, 4])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 6)), max_size=30), st.booleans())
def test_counting_its_events_gives_exactly_what_the_rank_holds(
    prompts: list[tuple[int, int, int]], two_at_once: bool
) -> None:
    rank = EngineRank(RankSpec(2, 14, own_cpu_blocks=5))
    held: Counter[tuple[str, int | bytes]] = Counter()
    running = []
    for token, length, limit in prompts:
        tokens = [token] * length
        run = rank.start(tokens, limit, hashes=rank.hash_prompt(tokens, None, None))
        if run is not None:
            running.append((run, limit))
        while running and (run is None or not two_at_once or len(running) > 1):
            done, output = running.pop(0)
            rank.decode(done, [token] * output)
            rank.finish(done)
        for event in [*rank.step_events(), *rank.step_events()]:
            if isinstance(event, BlockStored):
                held.update((str(event.medium), block_hash) for block_hash in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                held.subtract((str(event.medium), block_hash) for block_hash in event.block_hashes)
        assert min(held.values(), default=0) >= 0
        now = {key for key, count in held.items() if count}
        assert rank.own_cpu is not None
        assert now == {("GPU", low64(h)) for h in rank.pool.cached_hashes} | {
            ("CPU", low64(h)) for h in rank.own_cpu.hashes
        }


def test_more_blocks_than_are_free_is_an_error() -> None:
    rank = EngineRank(RankSpec(2, 2))
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 free"):
        rank.pool.allocate(3)
