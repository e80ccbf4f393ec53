"""The index port: one prefix index per space, behind which the plain and the compiled core are interchangeable.

Semantics, equal for every implementation (tests/unit/test_index_behaviour.py runs against all of them, and
tests/index_reference.py says the same slowly and literally):

* **Numbers.** A *holder* is a worker (instance, dp_rank) or a pool location; a *domain* is the name space of engine
  hashes. Both are positive integers given out by the caller (up to 2**31), and never given out twice in the life of an
  index. A holder belongs to one domain: a worker has its own, all locations of a pool share one. `parent_domain` is the
  domain of whoever taught the content, or `domain` again.
* **Claims.** A stored block is a claim: (holder, tier, engine hash) -> prefix key, with a number of stores. A holder
  has a key in a tier as long as one of its claims there says so; several engine hashes may claim one key.
* **Names.** (domain, engine hash) -> prefix key: where parents and blocks without content are looked up. A name is
  there as long as any claim of that domain is under it, whatever its tier and holder; the latest store of a name
  decides what it means.
* **Repeated stores** of a claim: with `counted` its number of stores goes up and each needs a removal; otherwise it
  stays (docs/adr/0006). The same holder, tier and name under *another* key is a contradiction: the new one replaces the
  old and its stores begin at 1 (counted as `renamed`; children that are attached already stay where they are).
* **Chains.** `parent` None starts a chain at `root`; a parent given makes `root` meaningless. The parent is looked up
  in `domain`, then in `parent_domain`. Every block of the chain gets its key even where it is not claimed.
* **Waiting room.** A chain whose parent has no name waits, it is never treated as a root. When the name appears in
  either domain, by whatever kind of store, the chains waiting for it are attached in the same call: after the call's
  own blocks, first those waiting for its first new name, in order of arrival, and so on; then, in the order in which
  they were attached, those that waited for their names. They count in the result of that call. The room has at most
  `max_waiting_blocks` blocks: the oldest chains leave for new ones (counted as `refused` in that call and as
  `evicted`), a chain larger than the room is refused itself. Time alone expires nothing.
* **Without content** (`content_hashes` empty) blocks are taken by name, looked up like parents, each for itself;
  unknown names are ignored and counted.
* **Removal** of an engine hash touches one tier of one holder and forgets nothing else: what follows it in a chain is
  hidden until the hole is filled. It undoes one store. Stores that still wait come first: all of them if they are not
  counted (and the claim is taken as well), one if they are (and the claim stays). A block removed while it waits keeps
  its place in the chain. Hashes neither claimed nor waiting are harmless and counted.
* **Clearing** takes claims, whatever their number of stores, and waiting chains of the holder in these tiers. After
  `clear_some` of all tiers has come to its end, the index has no trace of the holder.
* **Budget.** At most `max_blocks` distinct keys; a block with a new key beyond that is refused and gets no name.
* A query sees each call entirely or not at all.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview | array[int]"

NPU, CPU, DISK = 0, 1, 2
TIERS = (NPU, CPU, DISK)
DEFAULT_MAX_WAITING_BLOCKS = 262_144
DEFAULT_MAX_BLOCKS = 20_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker to be answered for: its holder id and the ids of the pool locations local to it."""

    holder: int
    local_holders: frozenset[int] = frozenset()


class Coverage(NamedTuple):
    """Blocks of a query a worker can use, exclusive per tier.

    The contiguous prefix it has in its NPU, then block by block the fastest tier that has the block: CPU before disk,
    within a tier local before remote, until a block that nobody reachable has. Local is the worker's own CPU / disk
    tier and `local_holders`; remote is `pool_holders`. What other workers have to themselves is out of reach.
    """

    npu: int
    cpu_local: int
    cpu_remote: int
    disk_local: int
    disk_remote: int


NOTHING = Coverage(0, 0, 0, 0, 0)


class StoreResult(NamedTuple):
    """What became of a store, in blocks.

    attached: newly held, by this chain or by chains that had waited for it; repeated: held already; waiting: parked for
    a parent; unknown: without content and without a known name; refused: over a limit (also blocks of other chains that
    left the waiting room for this one).
    """

    attached: int = 0
    repeated: int = 0
    waiting: int = 0
    unknown: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes: blocks (distinct prefix keys), memberships (holder, tier, key), names, waiting (parked blocks), bytes (a
    memory estimate). Since the beginning: evicted (blocks dropped by a limit), unknown_names (blocks without content
    and without a known name), unknown_removals, renamed (claims that moved to another key). forgotten: claims that
    `shrink` took and whose holders have not taken them back since, so memberships / (memberships + forgotten) is the
    share of what holders have that the index knows."""

    blocks: int
    memberships: int
    names: int
    waiting: int
    bytes: int
    evicted: int
    unknown_names: int = 0
    unknown_removals: int = 0
    renamed: int = 0
    forgotten: int = 0


class PrefixIndex(Protocol):
    """One space's index. Not for concurrent writers; readers may run beside one writer."""

    implementation: str

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
        """Apply a chain of blocks. engine_hashes, content_hashes: packed LE u64 of equal length (or empty content).

        Raises ValueError, and changes nothing, when the two differ in length or are not multiples of 8 bytes.
        """
        ...

    def removed(self, holder: int, tier: int, domain: int, engine_hashes: bytes) -> int:
        """Take blocks from one tier of a holder; the number of blocks that it no longer has there.

        Raises ValueError when engine_hashes is not a multiple of 8 bytes long.
        """
        ...

    def cleared(self, holder: int, tiers: Sequence[int]) -> int:
        """Take everything from these tiers of a holder, counts and parked chains included; blocks that left."""
        ...

    def clear_some(self, holder: int, tiers: Sequence[int], limit: int) -> bool:
        """The same in slices: parked chains and at most `limit` claims. Whether there is more to do."""
        ...

    def match(self, keys: Buffer, candidates: Sequence[Candidate], pool_holders: frozenset[int]) -> list[Coverage]:
        """Coverage of a query given as packed prefix keys, one entry per candidate, in order.

        pool_holders: every pool location whose blocks are reachable from all candidates (unregistered nodes' too).
        """
        ...

    def match_tokens(
        self,
        tokens: Buffer,
        block_size: int,
        root: int,
        candidates: Sequence[Candidate],
        pool_holders: frozenset[int],
    ) -> list[Coverage]:
        """The same for little-endian u32 tokens, of which whole blocks count. Raises ValueError for no such buffer."""
        ...

    def match_contents(
        self, content_hashes: Buffer, root: int, candidates: Sequence[Candidate], pool_holders: frozenset[int]
    ) -> list[Coverage]:
        """The same for packed content hashes."""
        ...

    def shrink(self, size: int, limit: int) -> bool:
        """Forget the oldest blocks that nothing follows, about `limit` claims, until the index uses `size` bytes.

        Whether there is more to do; False also where the implementation cannot, and then stats().bytes tells.
        """
        ...

    def holder_blocks(self, holder: int) -> tuple[int, int, int]:
        """Blocks a holder has per tier (npu, cpu, disk)."""
        ...

    def waiting_blocks(self, holder: int) -> int:
        """Blocks of a holder that wait for a parent."""
        ...

    def stats(self) -> IndexStats:
        """Sizes for /workers and metrics."""
        ...

    def audit(self) -> list[str]:
        """Recompute every invariant; a sentence per violation, empty when sound."""
        ...

    def snapshot(self) -> bytes:
        """Everything the index holds, in the form of services.router.index.snapshots. Queries go on meanwhile."""
        ...

    def restore(self, snapshot: bytes) -> None:
        """Fill an empty index. Raises ValueError, and stays empty, for a foreign, newer or damaged snapshot."""
        ...
