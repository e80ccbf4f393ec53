"""A lease in NATS KV: one holder, handed over at once when given up, after its time when the holder is gone."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from nats.aio.client import Client

from schemas.subjects import LEASE_BUCKET
from services.runtime.broker import ensure_streams
from services.runtime.kv_lease import KvLease
from services.runtime.settings import NatsSettings

TTL = 0.6


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


@pytest.fixture
async def pair(nats_client: Client) -> AsyncIterator[tuple[KvLease, KvLease]]:
    await ensure_streams(nats_client.jetstream(), NatsSettings())
    leases = (KvLease(nats_client.jetstream(), "job", TTL), KvLease(nats_client.jetstream(), "job", TTL))
    yield leases
    for lease in leases:
        await lease.stop()


async def test_only_one_of_two_replicas_holds_the_lease(pair: tuple[KvLease, KvLease]) -> None:
    for lease in pair:
        lease.start()
    await until(lambda: any(lease.held for lease in pair), "a holder")
    first = pair[0].held
    for _ in range(50):
        assert [pair[0].held, pair[1].held] == [first, not first]
        await asyncio.sleep(TTL / 20)


async def test_a_lease_that_is_given_up_is_taken_at_the_next_look(pair: tuple[KvLease, KvLease]) -> None:
    pair[0].start()
    await asyncio.wait_for(pair[0].wait(), 5)
    pair[1].start()
    await pair[0].stop()
    began = time.monotonic()
    await asyncio.wait_for(pair[1].wait(), 5)
    assert time.monotonic() - began < TTL
    assert not pair[0].held


async def test_a_holder_that_dies_is_replaced_after_the_leases_time(pair: tuple[KvLease, KvLease]) -> None:
    pair[0].start()
    await asyncio.wait_for(pair[0].wait(), 5)
    assert pair[0]._task is not None
    pair[0]._task.cancel()
    pair[1].start()
    await asyncio.wait_for(pair[1].wait(), 5)
    assert not pair[0].held, "two hold it"


async def test_a_holder_whose_record_was_overwritten_stops_at_once(
    pair: tuple[KvLease, KvLease], nats_client: Client
) -> None:
    pair[0].start()
    await asyncio.wait_for(pair[0].wait(), 5)
    bucket = await nats_client.jetstream().key_value(LEASE_BUCKET)
    await bucket.put("job", b"somebody else")
    await until(lambda: not pair[0].held, "lost")
