"""Cache groups of hybrid models: a removal names its group, not its kind; so kinds are remembered per publisher."""

from typing import Final

from schemas.wire.types import Rejected, RejectReason, WireBatch, WireEvent, WireRemoved, WireStored

MAX_GROUPS: Final = 1_024


class GroupFilter:
    """Drops removals of cache groups that are not main attention. One per publisher.

    HY-02: a sliding-window group's removal must leave the full-attention group's block alone. A group is known by its
    stores; removals of a group never seen pass, which can only hide a block that is still cached.
    """

    def __init__(self) -> None:
        self._other_groups: set[int] = set()

    def apply(self, batch: WireBatch) -> WireBatch:
        """The batch without removals of groups known to be other than main attention, which join the refused."""
        # Bounded: the codec refuses group numbers from MAX_GROUPS on.
        self._other_groups |= batch.other_groups
        if not self._other_groups:
            return batch
        kept: list[WireEvent] = []
        rejected = list(batch.rejected)
        for position, event in enumerate(batch.events):
            if isinstance(event, WireStored) and event.group_idx is not None:
                self._other_groups.discard(event.group_idx)
            if isinstance(event, WireRemoved) and event.group_idx in self._other_groups:
                detail = f"removal in cache group {event.group_idx}"
                rejected.append(Rejected(position, RejectReason.NON_MAIN_ATTENTION, detail))
            else:
                kept.append(event)
        return WireBatch(batch.timestamp, tuple(kept), tuple(rejected), batch.dp_rank)
