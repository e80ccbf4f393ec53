"""The CPU tier an engine has to itself (vLLM's OffloadingConnector): hashes in least-recently-used order."""

from collections import OrderedDict
from collections.abc import Sequence


class OwnCpuTier:
    """Keeps up to ``capacity`` blocks; a request's blocks age from its tail, as in the real connector."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    @property
    def hashes(self) -> set[bytes]:
        """What the tier holds."""
        return set(self._blocks)

    def prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading hashes the tier holds."""
        for position, block_hash in enumerate(hashes):
            if block_hash not in self._blocks:
                return position
        return len(hashes)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a sequence's blocks as used just now."""
        for block_hash in reversed(hashes):
            if block_hash in self._blocks:
                self._blocks.move_to_end(block_hash)

    def store(self, hashes: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Add blocks; those that were new, and those evicted for them. More than fit: nothing is stored."""
        wanted = set(hashes)
        new = [block_hash for block_hash in hashes if block_hash not in self._blocks]
        room_needed = len(self._blocks) + len(new) - self.capacity
        evicted: list[bytes] = []
        for block_hash in self._blocks:
            if len(evicted) >= room_needed:
                break
            if block_hash not in wanted:
                evicted.append(block_hash)
        if len(evicted) < room_needed:
            return [], []
        for block_hash in evicted:
            del self._blocks[block_hash]
        self._blocks.update((block_hash, None) for block_hash in reversed(new))
        return new, evicted
