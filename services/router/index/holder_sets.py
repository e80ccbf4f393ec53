"""Interned sets of holders: blocks held by the same holders share one set, so a set costs its blocks one pointer."""


class HolderSets:
    """Every distinct set that some block refers to, with the number of references."""

    def __init__(self) -> None:
        self._uses: dict[frozenset[int], int] = {}
        self._canonical: dict[frozenset[int], frozenset[int]] = {}

    def with_holder(self, current: frozenset[int] | None, holder: int) -> frozenset[int]:
        """The set that a block refers to after `holder` has joined those of `current` (None: nobody)."""
        grown = self._take(frozenset((holder,)) if current is None else current | {holder})
        if current is not None:
            self._drop(current)
        return grown

    def without_holder(self, current: frozenset[int], holder: int) -> frozenset[int] | None:
        """The set that a block refers to after `holder` has left, None when nobody remains."""
        left = current - {holder}
        shrunk = self._take(left) if left else None
        self._drop(current)
        return shrunk

    def uses(self) -> dict[frozenset[int], int]:
        """References by set, for audits."""
        return dict(self._uses)

    def _take(self, wanted: frozenset[int]) -> frozenset[int]:
        uses = self._uses.get(wanted, 0)
        self._uses[wanted] = uses + 1
        return self._canonical.setdefault(wanted, wanted)

    def _drop(self, current: frozenset[int]) -> None:
        uses = self._uses[current] - 1
        if uses:
            self._uses[current] = uses
        else:
            del self._uses[current], self._canonical[current]
