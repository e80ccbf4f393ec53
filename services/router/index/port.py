"""The index port: one prefix index per space, behind which the plain and the compiled core are interchangeable.

Semantics, equal for every implementation (one behaviour suite runs against all of them):

* A *holder* is a small integer given out by the caller: a worker (instance, dp_rank) or a pool location.
* A *domain* is a small integer: the name space of engine hashes. A worker has its own; all locations of a pool share
  one.
* ``names``: (domain, engine_hash) -> prefix_key: what was said of the name last, as long as any holder of the domain
  claims it. A holder that names a block twice under different hashes has it until both are removed.
* ``stored`` resolves the parent in ``domain``, then in ``parent_domain``. Unknown parent: the chain waits in a
  bounded room and is
  attached when that name appears in either domain; it is never treated as a root.
* Empty ``content_hashes``: the blocks are taken by name (``domain``, then ``parent_domain``); unknown names are
  ignored and counted.
* ``counted``: a repeated store of a hash by the same holder in the same tier needs a removal more (docs/adr/0006).
  Otherwise a set.
* A removal touches one tier of one holder and forgets nothing else: what follows it in the chain is hidden for that
  holder until the
  hole is filled. Unknown hashes are harmless and counted.
* A query sees each call entirely or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NPU, CPU, DISK = 0, 1, 2
TIERS = (NPU, CPU, DISK)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker to be answered for: its holder id and the ids of the pool locations local to it."""

    holder: int
    local_holders: frozenset[int] = frozenset()


class Coverage(NamedTuple):
    """Blocks of a query a worker can use, exclusive per tier (design: contiguous NPU prefix, then block by block
    through the
    fastest tier that has the block, CPU before disk, local before remote). Local includes the worker's own CPU / disk
    tier."""

    npu: int
    cpu_local: int
    cpu_remote: int
    disk_local: int
    disk_remote: int


@dataclass(frozen=True, slots=True)
class StoreResult:
    """attached: blocks newly held; repeated: blocks that were held already; waiting: blocks parked for a parent;
    unknown: token-less blocks whose name is not known; refused: blocks over a limit."""

    attached: int = 0
    repeated: int = 0
    waiting: int = 0
    unknown: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """blocks: distinct prefix keys; memberships: (holder, tier, block); names; waiting: parked blocks; bytes: memory
    estimate;
    evicted: blocks dropped by the budget so far; unreachable: blocks parked or whose chain start nobody holds (0 if
    not tracked)."""

    blocks: int
    memberships: int
    names: int
    waiting: int
    bytes: int
    evicted: int


class PrefixIndex(Protocol):
    """One space's index. Not for concurrent writers; readers may run beside one writer."""

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
        """Apply a chain of blocks. engine_hashes, content_hashes: packed LE u64 of equal length (or empty content)."""
        ...

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> int:
        """Take blocks from one tier of a holder; the number of blocks that really left."""
        ...

    def cleared(self, holder: int, tiers: Sequence[int]) -> int:
        """Take everything from these tiers of a holder, counts and parked chains included; blocks that left."""
        ...

    def match(self, keys: bytes, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        """Coverage of a query given as packed prefix keys, one entry per candidate, in order.

        pool_holders: every pool location whose blocks are reachable from all candidates (unregistered nodes' too).
        """
        ...

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        """Blocks a holder has per tier (npu, cpu, disk)."""
        ...

    def stats(self) -> IndexStats:
        """Sizes for /workers and metrics."""
        ...

    def audit(self) -> list[str]:
        """Recompute every invariant; a sentence per violation, empty when sound."""
        ...
