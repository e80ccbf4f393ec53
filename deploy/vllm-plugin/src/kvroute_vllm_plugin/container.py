"""The event container that travels from a worker to the engine core: one child container per child index.

vLLM's aggregator takes the first rank's container, feeds the others' ``get_all_events()`` into its ``add_events()`` and
counts a worker more. Keyed by child index, two children of one class stay apart, and a child that is silent on the
first rank is not lost. Instances are pickled, so this module must be importable in the engine core as well.
"""

from typing import Any, NamedTuple

from vllm.distributed.kv_events import KVConnectorKVEvents


class ChildEvents(NamedTuple):
    """What one rank's child handed over: the unit in which rank containers are merged."""

    child: int
    events: Any


class MultiConnectorKVEvents(KVConnectorKVEvents):
    """Containers of a MultiConnector's children by child index."""

    def __init__(self, children: dict[int, Any]) -> None:
        self._children = children

    def child(self, index: int) -> Any:
        """The child's own container, None when it had no events."""
        return self._children.get(index)

    def add_events(self, events: list[Any]) -> None:
        """Merge another rank's children; each child counts the ranks that reported for it."""
        for child, container in events:
            own = self._children.get(child)
            if own is None:
                self._children[child] = container
            else:
                own.add_events(container.get_all_events())
                own.increment_workers(1)

    def get_all_events(self) -> list[Any]:
        """The children's containers, in the form that add_events takes."""
        return [ChildEvents(child, events) for child, events in self._children.items()]

    def aggregate(self) -> "MultiConnectorKVEvents":
        """Aggregate every child by its own rule."""
        for events in self._children.values():
            events.aggregate()
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Nothing: add_events has counted per child, since not every rank reports for every child."""

    def get_number_of_workers(self) -> int:
        """The largest number of ranks that reported for one child."""
        return max((events.get_number_of_workers() for events in self._children.values()), default=0)

    def clear_events(self) -> None:
        """Clear every child's events."""
        for events in self._children.values():
            events.clear_events()
