"""Physical KV blocks of one DP rank: a free queue in least-recently-used order, blocks found by their hash."""

from collections import OrderedDict
from collections.abc import Iterable


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free."""


class BlockPool:
    """Fixed number of blocks; a free block keeps its content and its hash until it is given out again.

    Two blocks may hold the same content (two equal requests running at once); each has the hash and each loses it
    on its own, as in a real engine.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, got {capacity}")
        self.capacity = capacity
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))
        self._users = [0] * capacity
        self._hash_of: dict[int, bytes] = {}
        self._blocks_of: dict[bytes, dict[int, None]] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks no request is using, cached ones included."""
        return len(self._free)

    @property
    def cached_hashes(self) -> set[bytes]:
        """Hashes that a request could hit right now."""
        return set(self._blocks_of)

    @property
    def cached_blocks(self) -> int:
        """Number of distinct blocks a request could hit."""
        return len(self._blocks_of)

    def find(self, block_hash: bytes) -> int | None:
        """A block with this content, or None."""
        blocks = self._blocks_of.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def is_free(self, block: int) -> bool:
        """Whether no request is using the block."""
        return block in self._free

    def touch(self, blocks: Iterable[int]) -> None:
        """Use cached blocks: they cannot be given out until released."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def allocate(self, count: int) -> tuple[list[int], list[bytes]]:
        """Give out blocks, least recently used first, and the hashes evicted by it. Raises OutOfBlocksError."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        blocks: list[int] = []
        evicted: list[bytes] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._users[block] = 1
            if block in self._hash_of:
                evicted.append(self._forget(block))
            blocks.append(block)
        return blocks, evicted

    def assign(self, block: int, block_hash: bytes) -> None:
        """Name the content of a block that has just been filled."""
        self._hash_of[block] = block_hash
        self._blocks_of.setdefault(block_hash, {})[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Stop using blocks; those without users join the free queue in the order given (first = evicted first).

        Blocks that were never filled have nothing to lose: they are given out before all others.
        """
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all content; False (and nothing done) while any block is in use."""
        if len(self._free) != self.capacity:
            return False
        self._hash_of.clear()
        self._blocks_of.clear()
        return True

    def _forget(self, block: int) -> bytes:
        block_hash = self._hash_of.pop(block)
        blocks = self._blocks_of[block_hash]
        del blocks[block]
        if not blocks:
            del self._blocks_of[block_hash]
        return block_hash
