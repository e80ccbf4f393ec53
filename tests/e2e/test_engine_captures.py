"""What real vLLM engines published goes in through real ZMQ sockets; what they had cached comes out of /query."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq.asyncio

from kvroute.sim.publisher import EventPublisher
from tests.captures import engine_capture, engine_capture_names
from tests.e2e.support import Counts, Pipeline, Router, unique

Message = dict[str, Any]


@pytest.fixture
async def publisher() -> AsyncIterator[EventPublisher]:
    context = zmq.asyncio.Context()
    publisher = EventPublisher(context, "tcp://127.0.0.1:0")
    yield publisher
    await publisher.close()
    context.destroy(linger=0)


def has_own_cpu_tier(name: str) -> bool:
    """Whether the engine ran vLLM's OffloadingConnector (its CPU events prove themselves, no pool behind them)."""
    return "offload" in name


def frames(message: Message) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in message["frames_hex"]]


@pytest.mark.parametrize("name", engine_capture_names())
async def test_the_index_promises_exactly_what_the_engine_then_had(
    name: str, publisher: EventPublisher, router: Router, pipeline: Pipeline
) -> None:
    capture = engine_capture(name)
    model, instance = unique("captured"), unique(f"engine-{name}")
    size = capture["block_size"]
    await router.register_engine(
        model, instance, publisher, size, store_backend="None", own_tiers=["cpu"] if has_own_cpu_tier(name) else []
    )
    live: list[Message] = list(capture["live"])
    promised, actual = [], []
    for prompt in capture["prompts"]:
        tokens = prompt["prompt_token_ids"]
        usable = tokens[: (len(tokens) - 1) // size * size]
        salt = {"cache_salt": prompt["cache_salt"]} if "cache_salt" in prompt else {}
        counts = await router.counts(model, size, usable, instance, **salt)
        promised.append((prompt["phase"], counts.matched))
        actual.append((prompt["phase"], prompt["num_cached_tokens"]))
        assert counts.matched == (counts.npu + counts.cpu) * size
        while live and live[0]["phase"] == prompt["phase"]:
            publisher.send(frames(live.pop(0)))
        await pipeline.drained(publisher)
    assert live == []
    assert promised == actual


@pytest.mark.parametrize(
    "name",
    [
        "vllm-0.23.0_plain",
        "vllm-0.23.0_offload",
        "vllm-0.25.0_multi-worker_plugin",
        "vllm-0.32.0_plain_int",
        "vllm-0.32.0_offload_selfdesc",
        "vllm-0.32.0_bytes_sha256",
    ],
)
async def test_blocks_lie_in_the_tiers_the_engine_reported(
    name: str, publisher: EventPublisher, router: Router, pipeline: Pipeline
) -> None:
    """After the first two prompts: three blocks on the device, and as many in the CPU tier where there is one."""
    capture = engine_capture(name)
    model, instance, size = unique("captured"), unique(f"engine-{name}"), capture["block_size"]
    own = has_own_cpu_tier(name)
    await router.register_engine(
        model, instance, publisher, size, store_backend="None", own_tiers=["cpu"] if own else []
    )
    for message in capture["live"]:
        if message["phase"] == "A_first":
            publisher.send(frames(message))
    await pipeline.drained(publisher)
    tokens = capture["prompts"][0]["prompt_token_ids"][: 3 * size]
    assert await router.counts(model, size, tokens, instance) == Counts(npu=3, matched=3 * size)
    held = await router.held(instance)
    assert held == (3, 3 if own else 0, 0)


async def test_two_engines_with_private_hashes_share_a_prefix_in_the_index(router: Router, pipeline: Pipeline) -> None:
    """Seeds differ, so the engines call the same blocks by different names; the index knows them by content."""
    names = ("vllm-0.32.0_bytes_cbor_seed42", "vllm-0.23.0_bytes_sha256_seed0")
    model = unique("captured")
    context = zmq.asyncio.Context()
    publishers = [EventPublisher(context, "tcp://127.0.0.1:0") for _ in names]
    instances = [unique(name) for name in names]
    for name, instance, publisher in zip(names, instances, publishers, strict=True):
        await router.register_engine(model, instance, publisher, 32, store_backend="None")
        for message in engine_capture(name)["live"]:
            if message["phase"] == "A_first":
                publisher.send(frames(message))
    await asyncio.gather(*(pipeline.drained(publisher) for publisher in publishers))
    tokens = engine_capture(names[0])["prompts"][0]["prompt_token_ids"]
    for instance in instances:
        assert await router.counts(model, 32, tokens, instance) == Counts(npu=3, matched=96)
    for publisher in publishers:
        await publisher.close()
    context.destroy(linger=0)
