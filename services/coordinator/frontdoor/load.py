"""How many requests run where (pure). A charge is given back exactly once, by leaving its block."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Worker(NamedTuple):
    """A DP rank of an instance."""

    instance_id: str
    dp_rank: int


class LoadAccount:
    """Running requests per worker; workers without any take no room."""

    def __init__(self) -> None:
        self._running: Counter[Worker] = Counter()

    @contextmanager
    def charge(self, worker: Worker) -> Iterator[None]:
        """Count a request on a worker for as long as the block is open, however it is left."""
        self._running[worker] += 1
        try:
            yield
        finally:
            self._running[worker] -= 1
            if not self._running[worker]:
                del self._running[worker]

    def running(self, worker: Worker) -> int:
        """Requests on a worker now."""
        return self._running[worker]

    @property
    def total(self) -> int:
        """Requests on all workers now."""
        return self._running.total()
