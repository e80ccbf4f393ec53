"""The engine model: one prefill server that takes requests in order, and an LRU of blocks."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.simulate.trace import TraceRequest


class Served(NamedTuple):
    """What became of a request: finish in seconds, blocks found, blocks newly held (a tail), blocks evicted."""

    finish: float
    hits: int
    stored: tuple[int, ...]
    evicted: list[int]


@dataclass(slots=True)
class BlockCache:
    """The most recently used `capacity` blocks; of one request the last blocks leave first."""

    capacity: int
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def leading(self, blocks: tuple[int, ...]) -> int:
        """Leading blocks that are held."""
        return next((place for place, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def use(self, blocks: tuple[int, ...]) -> list[int]:
        """Hold these, as used now; what had to leave."""
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        return [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.capacity)]


@dataclass(slots=True)
class Node:
    """rate: prefill tokens per second. free_at: when the queue is empty. computed: tokens so far."""

    rate: float
    cache: BlockCache
    free_at: float = 0.0
    computed: int = 0

    def serve(self, request: TraceRequest, block_size: int) -> Served:
        """Put a request at the end of the queue. What waits before it is in the cache by the time it starts."""
        hits = self.cache.leading(request.blocks)
        missing = request.tokens - hits * block_size
        self.free_at = max(self.free_at, request.at) + missing / self.rate
        self.computed += missing
        return Served(self.free_at, hits, request.blocks[hits:], self.cache.use(request.blocks))
