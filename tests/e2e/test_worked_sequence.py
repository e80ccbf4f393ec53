"""The worked sequence of a memcache pool and one engine, step by step over real sockets through all services."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from kvroute.embedded import EmbeddedStack
from kvroute.sim.vllm_events import BlockRemoved, BlockStored
from kvroute.taps.follow import connect, state_notes
from schemas.blocks import content_hashes, token_bytes
from schemas.events import STATES, StateNote
from tests.e2e.support import Counts, EngineStub, PoolStub, Router, eventually, unique

BLOCK_SIZE = 4
TOKENS = list(range(1, 9))
A, B = 0xA1A1_0000_0000_000A, 0x0B0B_0000_0000_000B
NODE = "127.0.0.5"
DECODE_NODE = "10.244.0.9"


def stored(hashes: list[int], tokens: list[int], medium: str, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=[*hashes],
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=BLOCK_SIZE,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


class Node:
    """One prefill engine and one pool, registered for a model of their own."""

    def __init__(self, router: Router) -> None:
        self._context = context = zmq.asyncio.Context()
        self.router = router
        self.model = unique("worked")
        self.name = unique("vllm-prefill")
        self.engine = EngineStub(context, NODE)
        self.pool = PoolStub(context, self.model, BLOCK_SIZE)
        self._marks = 0

    async def register(self) -> None:
        await self.router.register_engine(self.model, self.name, self.engine.publisher, BLOCK_SIZE)
        await self.router.register_pool(self.model, unique("memcache-pool"), self.pool.publisher, BLOCK_SIZE)

    async def close(self) -> None:
        await self.engine.publisher.close()
        await self.pool.publisher.close()
        self._context.destroy(linger=0)

    async def counts(self) -> Counts:
        return await self.router.counts(self.model, BLOCK_SIZE, TOKENS, self.name)

    async def settle(self) -> None:
        """Until everything published before has reached the index: a marker block of each publisher is visible.

        Messages of one publisher stay in order on the whole way, so the marker comes last.
        """
        self._marks += 1
        mark = self._marks
        tokens = [1000 + mark] * BLOCK_SIZE
        self.engine.publish(stored([0xE0000 + mark], tokens, "GPU"))

        async def seen() -> Counts:
            return await self.router.counts(self.model, BLOCK_SIZE, tokens, self.name)

        await eventually(seen, Counts(npu=1, matched=BLOCK_SIZE))
        self.engine.publish(BlockRemoved(block_hashes=[0xE0000 + mark], medium="GPU"))
        self.pool.publish("stored", NODE, 0xE0000 + mark)
        await eventually(seen, Counts(cpu=1, matched=BLOCK_SIZE))

    async def expect(self, counts: Counts) -> None:
        await self.settle()
        assert await self.counts() == counts


@pytest.fixture
async def node(router: Router) -> AsyncIterator[Node]:
    node = Node(router)
    await node.register()
    yield node
    await node.close()


def test_content_hashes_equal_the_check_vectors() -> None:
    assert list(content_hashes(token_bytes(TOKENS), BLOCK_SIZE)) == [14643705804678351452, 16777012769546811212]


async def test_the_worked_sequence_gives_the_stated_counts_at_every_step(node: Node) -> None:
    both_on_npu, both_in_cpu = Counts(npu=2, matched=8), Counts(cpu=2, matched=8)
    node.engine.publish(stored([A, B], TOKENS, "GPU"))
    await node.expect(both_on_npu)  # step 3

    node.engine.publish(stored([A], TOKENS[:4], "cpu"))
    node.engine.publish(stored([B], TOKENS[4:], "cpu", parent=A))
    await node.expect(both_on_npu)  # step 4: said to be offloaded is not proof

    node.engine.publish(BlockRemoved(block_hashes=[A, B], medium="GPU"))
    await node.expect(Counts())  # step 5

    node.pool.publish("stored", NODE, A)
    await node.expect(Counts(cpu=1, matched=4))
    node.pool.publish("stored", NODE, B)
    await node.expect(both_in_cpu)  # step 6

    node.pool.publish("removed", NODE, A)
    await node.expect(Counts())  # step 7: B is there, but behind a hole

    node.pool.publish("stored", NODE, A)
    await node.expect(both_in_cpu)  # step 8


async def test_a_pool_that_speaks_first_is_matched_when_the_engine_offloads(node: Node) -> None:
    """Step 9 of the worked sequence: the pool's events come before the engine's."""
    node.pool.publish("stored", NODE, A)
    node.pool.publish("stored", NODE, B)
    await node.expect(Counts())
    node.engine.publish(stored([A], TOKENS[:4], "cpu"))
    node.engine.publish(stored([B], TOKENS[4:], "cpu", parent=A))
    await node.expect(Counts(cpu=2, matched=8))


async def test_an_npu_event_alone_gives_a_pool_block_its_content(node: Node) -> None:
    """The engine's offload events are lost (a MultiConnector without the plugin), the pool's are not."""
    node.engine.publish(stored([A, B], TOKENS, "GPU"))
    node.engine.publish(BlockRemoved(block_hashes=[A, B], medium="GPU"))
    node.pool.publish("stored", NODE, A)
    node.pool.publish("stored", NODE, B)
    await node.expect(Counts(cpu=2, matched=8))


async def test_an_unregistered_decode_nodes_memory_extends_a_registered_prefill_rank_as_remote_blocks(
    node: Node,
) -> None:
    node.engine.publish(stored([A, B], TOKENS, "GPU"))
    node.engine.publish(BlockRemoved(block_hashes=[B], medium="GPU"))
    node.pool.publish("stored", DECODE_NODE, B)
    await node.expect(Counts(npu=1, cpu=1, cpu_remote=1, matched=8))
    answer = await node.router.query(node.model, BLOCK_SIZE, TOKENS)
    assert list(answer) == [node.name]
    workers = (await node.router.http.get("/workers")).json()["workers"]
    assert not [worker for worker in workers if DECODE_NODE in worker["instance_id"]]


async def test_a_pools_clear_leaves_the_npu_alone(node: Node) -> None:
    node.engine.publish(stored([A, B], TOKENS, "GPU"))
    node.pool.publish("stored", NODE, A)
    node.pool.publish("stored", DECODE_NODE, B)
    await node.settle()
    node.pool.publish("cleared", NODE, medium=None)
    await node.expect(Counts(npu=2, matched=8))
    node.engine.publish(BlockRemoved(block_hashes=[A], medium="GPU"))
    await node.expect(Counts())


async def test_every_step_of_the_state_machine_can_be_tapped(node: Node, stack: EmbeddedStack) -> None:
    client = await connect(stack.nats_url)
    seen: dict[str, StateNote] = {}

    async def collect() -> None:
        async for note in state_notes(client, [], node.model):
            assert isinstance(note, StateNote)
            seen.setdefault(note.state, note)

    async def states() -> set[str]:
        return set(seen)

    collecting = asyncio.create_task(collect())
    while not seen:
        await node.settle()
    node.pool.publish("stored", NODE, A)
    await node.settle()
    node.engine.publish(stored([A, B], TOKENS, "cpu"))
    node.pool.publish("stored", NODE, B)
    wrong_size = stored([7], TOKENS, "GPU")
    wrong_size.block_size = 2 * BLOCK_SIZE
    node.engine.publish(wrong_size)
    node.engine.publish(stored([8], [9] * BLOCK_SIZE, "cpu"))
    await node.expect(Counts(cpu=2, matched=8))
    await eventually(states, set(STATES) - {"pending_expired"})
    collecting.cancel()
    await client.close()
    assert seen["matched"].medium == "cpu"
    assert seen["matched"].backend_id == NODE
    assert seen["dropped"].reason == "block_size_mismatch"
