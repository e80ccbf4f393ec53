"""The vocabulary of the matcher's state: operations on it, their results, and the names of holders (pure)."""

from dataclasses import dataclass
from enum import StrEnum

from schemas.blocks import Tier
from schemas.events import Holder, Location, Worker

TIER_CODES = {Tier.NPU: "n", Tier.CPU: "c", Tier.DISK: "d"}
TIERS_BY_CODE = {code: tier for tier, code in TIER_CODES.items()}

SpaceKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Teach:
    """Content of a chain of blocks. npu: it comes from an NPU event and wins over what offload events say.

    hashes, contents: packed LE u64 of equal length; parent: name of the block before the first; root: namespace of a
    chain without parent; teacher: the worker whose names these are. own: the names stay in the teacher's own domain
    (an engine whose tiers are its own); otherwise they are joined with those of pools.
    """

    npu: bool
    hashes: bytes
    parent: int | None
    contents: bytes
    root: int
    teacher: Worker
    own: bool = False


@dataclass(frozen=True, slots=True)
class Prove:
    """Blocks that landed in a tier of a holder; those without known content wait. own: in the holder's own domain."""

    hashes: bytes
    holder: Holder
    tier: Tier
    own: bool = False


@dataclass(frozen=True, slots=True)
class Undo:
    """Blocks that left; their waiting entries of this holder and tier go.

    forget_offload: the offload content that this very worker taught goes too, nobody else's. own: as in Prove.
    """

    hashes: bytes
    holder: Holder
    tier: Tier
    forget_offload: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Everything of a holder in these tiers stops waiting. A location without backend_id means the whole pool."""

    holder: Holder
    tiers: tuple[Tier, ...]


Operation = Teach | Prove | Undo | Forget


@dataclass(frozen=True, slots=True)
class Message:
    """What one message asks of a space.

    sequence: its place in KV_EVENTS; a negative one stands outside of the order: it is always applied and nothing of
    it is remembered. publisher: what its generation counts for (a worker, or a pool as a location without backend),
    None for no fence. lowest: the lowest generation that the registry admits.
    """

    sequence: int
    operations: tuple[Operation, ...] = ()
    publisher: Holder | None = None
    generation: int = 0
    lowest: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """What is known of one block. parent None: it starts a chain in the namespace root."""

    parent: int | None
    content_hash: int
    root: int
    teacher: Worker


@dataclass(frozen=True, slots=True)
class Waiting:
    """A holder that waits (or waited) for a block's content in a tier."""

    holder: Holder
    tier: Tier


@dataclass(frozen=True, slots=True)
class Taught:
    """Result of Teach: per block number, who waited for it, and who had been confirmed with poorer content."""

    matched: tuple[tuple[int, tuple[Waiting, ...]], ...] = ()
    corrected: tuple[tuple[int, tuple[Waiting, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Proved:
    """Result of Prove: the content of each block, None for those that wait now."""

    contents: tuple[Content | None, ...]


Result = Taught | Proved | None


@dataclass(frozen=True, slots=True)
class Expired:
    """A waiting entry whose time is over."""

    engine_hash: int
    waiting: Waiting


class Verdict(StrEnum):
    """What a message's generation means: it counts, it begins a new life (the old one's waiting is over), or it is of
    a life that is over."""

    ADMITTED = "admitted"
    RESTARTED = "restarted"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one message: a result per operation, none for a retired one."""

    results: tuple[Result, ...] = ()
    verdict: Verdict = Verdict.ADMITTED


@dataclass(frozen=True, slots=True)
class Applied:
    """What a store answers, per message sequence (None: that message was done and published long ago)."""

    answers: dict[int, Answer | None]
    capped_pending: int = 0
    capped_content: int = 0


class FencedError(Exception):
    """A newer leader has written to this space; the writer must stop at once."""


def holder_key(holder: Holder) -> str:
    """A holder as text, for use in stored state."""
    if isinstance(holder, Worker):
        return f"W{holder.instance_id}\0{holder.dp_rank}"
    return f"L{holder.pool_id}\0{holder.backend_id}"


def holder_of(key: str) -> Holder:
    """The reverse of holder_key."""
    name, _, rest = key[1:].rpartition("\0")
    return Worker(name, int(rest)) if key[0] == "W" else Location(name, rest)


def group_key(holder: Holder) -> str:
    """What is forgotten together: a worker, or all locations of a pool."""
    return holder_key(holder) if isinstance(holder, Worker) else f"P{holder.pool_id}"
