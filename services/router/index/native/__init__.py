"""The prefix index in C, where it was compiled; importing this raises ImportError where it was not.

The semantics are those of services.router.index.port; the data structures are described in table.h, sets.h and core.h.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.router.index.native._core import Core
from services.router.index.port import (
    DEFAULT_MAX_BLOCKS,
    DEFAULT_MAX_WAITING_BLOCKS,
    NOTHING,
    Buffer,
    Candidate,
    Coverage,
    IndexStats,
    StoreResult,
)

if TYPE_CHECKING:
    from services.router.index.native._core import Candidates as PackedCandidates

_COVERAGE = struct.Struct("=5I")
_NOTHING = (0, 0, 0, 0, 0)


class NativeIndex:
    """One space's index; implements PrefixIndex. hash_bits: fewer than 64 only to test collisions."""

    implementation = "native"

    def __init__(
        self,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        max_waiting_blocks: int = DEFAULT_MAX_WAITING_BLOCKS,
        hash_bits: int = 64,
    ) -> None:
        self.core = Core(max_blocks, max_waiting_blocks, hash_bits)
        self._packed: tuple[object, object, PackedCandidates] | None = None

    def stored(
        self,
        holder: int,
        tier: int,
        domain: int,
        engine_hashes: bytes,
        parent: int | None,
        content_hashes: bytes,
        root: int,
        parent_domain: int,
        counted: bool,
    ) -> StoreResult:
        """Apply a chain of blocks (port semantics). Raises ValueError when the two hash lists differ in length."""
        return StoreResult._make(
            self.core.stored(holder, tier, domain, engine_hashes, parent, content_hashes, root, parent_domain, counted)
        )

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> int:
        """Take blocks from one tier of a holder; the number of blocks that it no longer has there."""
        return self.core.removed(holder, tier, domain, engine_hashes)

    def cleared(self, holder: int, tiers: Sequence[int]) -> int:
        """Take everything from these tiers of a holder; blocks that left."""
        return self.core.cleared(holder, tiers)

    def clear_some(self, holder: int, tiers: Sequence[int], limit: int) -> bool:
        """The same in slices of at most `limit` claims; whether there is more to do."""
        return self.core.clear_some(holder, tiers, limit)

    def shrink(self, size: int, limit: int) -> bool:
        """Forget the oldest blocks that nothing follows until `size` bytes are enough; whether there is more to do."""
        return self.core.shrink(size, limit)

    def match(self, keys: Buffer, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        """Coverage of a query given as packed prefix keys, one entry per candidate, in order."""
        return _unpacked(self.core.match(keys, self.packed(candidates, pool_holders)))

    def match_tokens(
        self,
        tokens: Buffer,
        block_size: int,
        root: int,
        candidates: Sequence[Candidate],
        pool_holders: frozenset[int],
    ) -> list[Coverage]:
        """The same for little-endian u32 tokens, hashed no further than anybody has blocks."""
        return _unpacked(self.core.match_tokens(tokens, block_size, root, self.packed(candidates, pool_holders)))

    def match_contents(
        self, content_hashes: Buffer, root: int, candidates: Sequence[Candidate], pool_holders: frozenset[int]
    ) -> list[Coverage]:
        """The same for packed content hashes."""
        return _unpacked(self.core.match_contents(content_hashes, root, self.packed(candidates, pool_holders)))

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        """Blocks a holder has per tier (npu, cpu, disk)."""
        return self.core.holder_blocks(holder)

    def waiting_blocks(self, holder: int) -> int:
        """Blocks of a holder that wait for a parent."""
        return self.core.waiting_blocks(holder)

    def stats(self) -> IndexStats:
        """Sizes for /workers and metrics."""
        return IndexStats(*self.core.stats())

    def audit(self) -> list[str]:
        """Recompute every invariant; a sentence per violation, empty when sound."""
        return self.core.audit()

    def snapshot(self) -> bytes:
        """Everything the index holds (see services.router.index.snapshots)."""
        return self.core.snapshot()

    def restore(self, snapshot: bytes) -> None:
        """Fill an empty index. Raises ValueError, and stays empty, for a foreign, newer or damaged snapshot."""
        self.core.restore(snapshot)

    def packed(self, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> PackedCandidates:
        """Candidates in the form that the core takes; remembered for the last tuple."""
        packed = self._packed
        if packed is not None and packed[0] is candidates and packed[1] is pool_holders:
            return packed[2]
        local_ends = array("I")
        locals_ = array("I")
        for candidate in candidates:
            locals_.extend(candidate.local_holders)
            local_ends.append(len(locals_))
        made = self.core.candidates(
            array("I", [candidate.holder for candidate in candidates]), locals_, local_ends, array("I", pool_holders)
        )
        if isinstance(candidates, tuple):
            # Only what cannot change may be recognised by its identity.
            self._packed = (candidates, pool_holders, made)
        return made


def _unpacked(packed: bytes) -> list[Coverage]:
    make = Coverage._make
    return [make(counts) if counts != _NOTHING else NOTHING for counts in _COVERAGE.iter_unpack(packed)]
