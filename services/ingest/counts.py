"""What happened to everything a publisher sent: received = published + rejected + dropped + pending, at any moment."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """One kind of thing (messages or events) on its way through ingest."""

    received: int = 0
    published: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def pending(self) -> int:
        """Received, but neither published nor refused nor dropped yet."""
        return self.received - self.published - self.rejected.total() - self.dropped.total()


@dataclass(slots=True)
class Counts:
    """All counts of one publisher.

    messages: ZMQ messages; one that cannot be read is rejected as a whole. events: of the messages that could be read.
    blocks: stored and removed blocks published. rank_conflicts: batches whose dp_rank is not the registered one.
    block_size_seen: the last size that disagreed with the registration.
    """

    messages: Tally = field(default_factory=Tally)
    events: Tally = field(default_factory=Tally)
    blocks: int = 0
    rank_conflicts: int = 0
    block_size_seen: int = 0
