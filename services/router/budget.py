"""Keeps the indexes within their bytes: the oldest blocks that nothing follows go first (pure).

Where an index cannot forget (the plain one), its space takes no new blocks until it is small enough again.
"""

from collections.abc import Iterable

from services.router.space import Space

SLICE_CLAIMS = 2048
# Forgetting a little more than needed, so that it is not begun anew for every event.
LEFT_OF_LIMIT = 0.95


class Budget:
    """max_bytes: of all spaces together; max_space_bytes: of each."""

    def __init__(self, max_bytes: int, max_space_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_space_bytes = max_space_bytes
        self._goals: dict[Space, int] = {}

    def enforce(self, spaces: Iterable[Space]) -> bool:
        """Forget a slice where a limit is exceeded; whether there is more to forget."""
        sizes = {space: space.index.stats().bytes for space in spaces}
        self._goals = {space: goal for space, goal in self._goals.items() if space in sizes}
        for space, size in sizes.items():
            if size > self._max_space_bytes:
                self._goals.setdefault(space, int(self._max_space_bytes * LEFT_OF_LIMIT))
        excess = sum(sizes.values()) - self._max_bytes
        if excess > 0 and sizes:
            # The largest one pays: the others need not suffer from it.
            largest = max(sizes, key=lambda space: sizes[space])
            spare = int(self._max_bytes * (1 - LEFT_OF_LIMIT))
            self._goals.setdefault(largest, max(0, sizes[largest] - excess - spare))
        more = False
        for space, goal in list(self._goals.items()):
            if space.index.shrink(goal, SLICE_CLAIMS):
                more = True
                continue
            space.full = space.index.stats().bytes > goal
            if not space.full:
                del self._goals[space]
        return more


def coverage(memberships: int, forgotten: int) -> float:
    """The share of what holders have that the index knows, 1.0 while no budget bites."""
    return memberships / (memberships + forgotten) if forgotten else 1.0
