"""What becomes of messages in ingest, and how much room they may take (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.events import Event
from schemas.wire.types import Rejected
from services.ingest.arrivals import Arrival


@dataclass(slots=True)
class MemoryBudget:
    """Bytes that all buffers may hold together."""

    limit: int
    used: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of one message, for logs and taps. seq -1: it had none that could be read."""

    seq: int = -1
    arrival: Arrival | None = None
    events: Sequence[Event] = ()
    blocks: int = 0
    buffered: bool = False
    rejected: Sequence[Rejected] = ()
    dropped: str = ""
