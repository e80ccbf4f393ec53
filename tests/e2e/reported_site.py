"""A site as field reports describe it: publishers that send exactly these batches, and questions to the router."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq.asyncio

from kvroute.sim.publisher import EventPublisher
from tests.e2e.support import Counts, Pipeline, Router, eventually, unique

BLOCK = 4
NODE = "10.66.0.1"


def gpu_store(hashes: Sequence[Any], tokens: Sequence[int], parent: Any = None, **changes: Any) -> dict[str, Any]:
    """A map-encoded BlockStored of device memory."""
    event = {"type": "BlockStored", "block_hashes": [*hashes], "parent_block_hash": parent, "token_ids": [*tokens]}
    event |= {"block_size": BLOCK, "lora_id": None, "medium": "GPU"}
    return event | changes


def gpu_remove(*hashes: Any, **changes: Any) -> dict[str, Any]:
    """A map-encoded BlockRemoved of device memory."""
    return {"type": "BlockRemoved", "block_hashes": [*hashes], "medium": "GPU"} | changes


def tokens(blocks: int, size: int = BLOCK, first: int = 1) -> list[int]:
    """Token ids first, first + 1, ... that fill so many blocks."""
    return list(range(first, first + blocks * size))


class Site:
    """One model of its own on the shared stack, with publishers by the names of a report (A, B, POOL)."""

    def __init__(self, router: Router, pipeline: Pipeline) -> None:
        self.router = router
        self.pipeline = pipeline
        self.model = unique("reported")
        self.publishers: dict[str, EventPublisher] = {}
        self._context = zmq.asyncio.Context()
        self._prefix = unique("site")

    async def close(self) -> None:
        for publisher in self.publishers.values():
            await publisher.close()
        self._context.destroy(linger=0)

    def name(self, who: str) -> str:
        """The instance id behind a report's name."""
        return f"{self._prefix}-{who}"

    def publisher(self, key: str, host: str = "127.0.0.1") -> EventPublisher:
        """A PUB socket of the site; ``key`` names it from then on."""
        self.publishers[key] = EventPublisher(self._context, f"tcp://{host}:0")
        return self.publishers[key]

    async def engine(self, who: str, block_size: int = BLOCK, *, dp_rank: int = 0, key: str = "", **more: Any) -> None:
        publisher = self.publisher(key or who)
        body = {"store_backend": "None"} | more
        await self.router.register_engine(self.model, self.name(who), publisher, block_size, dp_rank=dp_rank, **body)

    async def pool(self, who: str = "POOL", block_size: int = BLOCK, **more: Any) -> None:
        publisher = self.publisher(who)
        body = {"instance_id": self.name(who), "type": "Mooncake", "modelname": self.model, "block_size": block_size}
        body |= {"dp_rank": 0, "endpoint": publisher.endpoint, "store_backend": "Mooncake"}
        await self.router.register_body(body | more)
        await asyncio.wait_for(publisher.subscribed(), 15.0)

    def publish(self, key: str, *events: Any, dp_rank: int | None = 0, timestamp: float = 1000.0) -> None:
        """One batch in the array form of vLLM and Mooncake."""
        self.publishers[key].publish(msgpack.packb([timestamp, [*events], dp_rank]))

    async def settle(self) -> None:
        """Until everything that was sent has reached the index."""
        for publisher in self.publishers.values():
            await self.pipeline.drained(publisher)

    async def counts(
        self, who: str, token_ids: Sequence[int], block_size: int = BLOCK, *, dp_rank: int = 0, **more: Any
    ) -> Counts:
        return await self.router.counts(self.model, block_size, token_ids, self.name(who), dp_rank, **more)

    async def npu(self, who: str, token_ids: Sequence[int], block_size: int = BLOCK, **more: Any) -> int:
        """Blocks of this prompt that an engine has in its own memory, once everything sent has arrived."""
        await self.settle()
        return (await self.counts(who, token_ids, block_size, **more)).npu

    async def status(self, key: str) -> dict[str, Any]:
        """What ingest says of a publisher."""
        return await self.pipeline.publisher(self.publishers[key].endpoint)

    async def refused(self, key: str, what: str = "events") -> dict[str, int]:
        """Refusals of a publisher by reason."""
        await self.settle()
        found: dict[str, int] = (await self.status(key))[what]["rejected"]
        return found

    async def stored_in_pool(self, *hashes: int, medium: str = "cpu", backend_id: str = NODE, **more: Any) -> None:
        """The Mooncake master reports objects on a node."""
        event = {"event_type": "stored", "seq_hashes": [*hashes], "medium": medium, "backend_id": backend_id}
        self.publish("POOL", event | more, timestamp=time.time() * 1000, dp_rank=None)
        await self.settle()

    async def eventually_npu(self, who: str, token_ids: Sequence[int], expected: int) -> None:
        async def read() -> int:
            return (await self.counts(who, token_ids)).npu

        await eventually(read, expected)

    async def note(self, key: str) -> str:
        """What /readyz of ingest remarks about a publisher, waited for."""

        async def told() -> bool:
            return bool(await self._note(key))

        await eventually(told, True)
        return await self._note(key)

    async def no_note(self, key: str) -> bool:
        """Whether /readyz of ingest has nothing (any more) to remark about a publisher."""

        async def note() -> str:
            return await self._note(key)

        await eventually(note, "")
        return True

    async def _note(self, key: str) -> str:
        ready = await self.pipeline.ingest("/readyz")
        assert ready["ready"] is True
        endpoint = self.publishers[key].endpoint
        return next((text for name, text in ready["notes"].items() if name.endswith(f" at {endpoint}")), "")
