"""The port behind which the waiting state lives: Redis in production, memory as its reference (one behaviour suite)."""

from collections.abc import Sequence
from typing import Protocol

from services.matcher.state import Applied, Expired, Operation, SpaceKey

Messages = Sequence[tuple[int, Sequence[Operation]]]


class MatcherStore(Protocol):
    """State per space. Times in milliseconds since the epoch, given by the caller."""

    async def apply(self, space: SpaceKey, epoch: int, messages: Messages, now: int, stream: int = 0) -> Applied:
        """Apply operations of messages (sequence, operations) in rising order, atomically and once.

        A sequence at or below the last one applied is not applied again: its stored result is returned if it belongs to
        the last call, None otherwise. A negative sequence stands outside of the order: it is always applied and nothing
        of it is remembered. `stream` identifies the stream in which sequences count: with another one they begin anew.
        Raises FencedError when a higher epoch has written.
        """
        ...

    async def expire(self, space: SpaceKey, epoch: int, now: int, limit: int) -> list[Expired]:
        """Remove and return waiting entries whose time is over, at most `limit` blocks' worth."""
        ...

    async def spaces(self) -> list[SpaceKey]:
        """Spaces that have state."""
        ...

    async def pending(self, space: SpaceKey) -> int:
        """Blocks that wait in a space."""
        ...
