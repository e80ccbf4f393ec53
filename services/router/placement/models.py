"""What placement decides about and what it answers. Time, randomness and all state are handed in by the caller."""

from dataclasses import dataclass
from enum import StrEnum

from services.router.index.port import NOTHING, Coverage

WorkerKey = tuple[str, int]


class Reason(StrEnum):
    """Why a decision fell as it did. The second half are the silent ways in which affinity is lost."""

    AFFINITY = "affinity"
    SPILL = "spill"
    NO_OVERLAP = "no_overlap"
    POLICY = "policy"
    FALLBACK = "fallback_load_balance"

    NO_CONTENT = "no_content"
    SHORTER_THAN_BLOCK = "shorter_than_block"
    OTHER_BLOCK_SIZE = "other_block_size"
    NO_STREAM_LIVE = "no_stream_live"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One request. tokens: prompt length. blocks: whole blocks of content known of it, 0 for a length alone.

    first_key: prefix key of the first block, for consistent_hash. candidates: instances to choose from, None: all.
    has_content: False where only a prompt length was given. block_size: tokens per block.
    """

    tokens: int
    block_size: int
    blocks: int = 0
    has_content: bool = True
    first_key: int = 0
    role: str | None = None
    candidates: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CandidateView:
    """A worker as a decision sees it.

    predicted_blocks: leading blocks of the request that were routed here moments ago. queued_tokens: prefill work
    charged and not done. decode_blocks: blocks of running requests. rate: prefill tokens per second.
    takes_requests: alive and not paused. live: its event stream can be believed. block_size: 0 is that of the request.
    """

    instance_id: str
    dp_rank: int = 0
    coverage: Coverage = NOTHING
    predicted_blocks: int = 0
    queued_tokens: int = 0
    decode_blocks: int = 0
    rate: float = 8000.0
    role: str | None = None
    takes_requests: bool = True
    live: bool = True
    block_size: int = 0

    @property
    def key(self) -> WorkerKey:
        """Identity of the worker."""
        return self.instance_id, self.dp_rank


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate's part in a decision. score: smaller is better; seconds for kv_affinity. tokens: of the prompt."""

    view: CandidateView
    score: float
    cached_tokens: int
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker chosen, who would have been next, and everyone considered, in the order given."""

    chosen: Scored
    runner_up: Scored | None
    reason: Reason
    policy: str
    candidates: tuple[Scored, ...]


class NoCandidateError(ValueError):
    """Nobody may take the request; the text says which filter took how many."""
