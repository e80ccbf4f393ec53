"""The port behind which the waiting state lives: Redis in production, memory as its reference (one behaviour suite)."""

from collections.abc import Collection, Sequence
from typing import Protocol

from services.matcher.state import Applied, Expired, Message, SpaceKey


class MatcherStore(Protocol):
    """State per space. Times in milliseconds since the epoch, given by the caller."""

    async def apply(self, space: SpaceKey, epoch: int, stream: int, messages: Sequence[Message], now: int) -> Applied:
        """Apply messages in rising order, atomically and once.

        A sequence at or below the last one applied is not applied again: its stored answer is returned as long as a
        later call has not gone past it, None afterwards. stream: when KV_EVENTS was created; in another stream the
        sequences count anew. Raises FencedError when a higher epoch has written.
        """
        ...

    async def expire(self, space: SpaceKey, epoch: int, now: int, limit: int) -> list[Expired]:
        """Remove and return waiting entries whose time is over, at most `limit` blocks' worth."""
        ...

    async def publishers(self, space: SpaceKey) -> set[str]:
        """Publishers (state.group_key) whose generation is remembered in a space."""
        ...

    async def forget_publishers(self, space: SpaceKey, epoch: int, groups: Collection[str]) -> None:
        """Forget the generations of publishers; harmless for unknown ones. Raises FencedError."""
        ...

    async def spaces(self) -> list[SpaceKey]:
        """Spaces that have state."""
        ...

    async def pending(self, space: SpaceKey) -> int:
        """Blocks that wait in a space."""
        ...
