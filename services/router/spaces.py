"""Applies index batches to the spaces: repeats are skipped, retired generations discarded, bad events cost themselves.

A space is (model, tenant) with an index of its own. Pure: no sockets, no clock.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from schemas.events import Holder, IndexBatch, IndexGroup, Location, Worker
from services.router.budget import Budget
from services.router.index.port import PrefixIndex
from services.router.publishers import (
    PublisherKey,
    Publishers,
    PublisherState,
    Verdict,
    publisher_key,
    same_space,
    spaces_of,
)
from services.router.space import BlockCounts, EventRefusedError, Space
from services.router.standing import Standings
from services.runtime.accounts import Account, Accounts
from services.runtime.registry_store import Registry

SpaceKey = tuple[str, str]


@dataclass(slots=True)
class ApplyCounts:
    """What became of events; every event is in exactly one of the first four. blocks: what became of their blocks."""

    applied: int = 0
    retired_generation: int = 0
    repeated_group: int = 0
    refused: int = 0
    blocks: BlockCounts = field(default_factory=BlockCounts)


class Spaces:
    """All spaces of a router. Not for concurrent use; `apply` can be interrupted between its slices.

    incomplete_before: what publishers stored before this moment (milliseconds since the epoch) may be missing, because
    the stream had dropped it already; 0 when nothing is.
    """

    def __init__(
        self,
        make_index: Callable[[], PrefixIndex],
        max_spaces: int = 1024,
        stale_after: float = math.inf,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget
        self._make_index = make_index
        self.standings = Standings(stale_after)
        self._max_spaces = max_spaces
        self.spaces: dict[SpaceKey, Space] = {}
        self.registry = Registry()
        self.publishers = Publishers()
        self.counts = ApplyCounts()
        self.accounts = Accounts(lambda key: self.publishers.is_registered(key))
        self.incomplete_before = 0
        self.on_refused: Callable[[str], None] = lambda reason: None

    def find(self, model: str, tenant: str) -> Space | None:
        """The space of a query with its candidates up to date, None when neither events nor registrations made one."""
        key = (model, tenant)
        space = self.spaces.get(key)
        if space is not None and space.stale:
            engines = [engine for _, engine in sorted(self.registry.engines.items()) if same_space(engine, key)]
            space.refresh(engines, self.standings)
        return space

    def apply(self, batch: IndexBatch) -> Iterator[None]:
        """Apply a batch, yielding after each slice of at most a few milliseconds so that queries can be let in."""
        space = self._open((batch.model, batch.tenant))
        if space is None:
            for group in batch.groups:
                account = self.accounts.of(publisher_key(group))
                account.received += len(group.events)
                account.reject("too_many_spaces", len(group.events))
            self._refuse(sum(len(group.events) for group in batch.groups), f"more than {self._max_spaces} spaces")
            return
        for group in batch.groups:
            account = self.accounts.of(publisher_key(group))
            account.received += len(group.events)
            if group.source_sequence and not self._is_next(space, batch.source_epoch, group):
                self.counts.repeated_group += len(group.events)
                account.drop("repeated", len(group.events))
                continue
            verdict = self.publishers.admit(group)
            if verdict is Verdict.NEW_LIFE:
                self._retire(publisher_key(group))
            yield from self._apply_group(space, group, verdict is not Verdict.DISCARDED, account)

    def set_registry(self, registry: Registry) -> None:
        """Take over a new view: what is gone or has a new life is cleared at once, candidates are made anew."""
        self.registry = registry
        for publisher in self.publishers.set_registry(registry):
            self._retire(publisher)
        for key in self._registered() - self.spaces.keys():
            self.spaces[key] = self._new_space()
        for space in self.spaces.values():
            space.stale = True

    def standings_changed(self) -> None:
        """What is offered has changed."""
        for space in self.spaces.values():
            space.stale = True

    def sweep(self) -> bool:
        """Drop a slice of what retired holders had, or of what is beyond the budget; whether there is more to drop."""
        if sum(space.sweep() for space in self.spaces.values()):
            return True
        return self._budget is not None and self._budget.enforce(self.spaces.values())

    def reset(self) -> None:
        """Forget all blocks and positions (the stream was lost); registrations and generations stay."""
        self.spaces.clear()
        self.incomplete_before = 0
        self.set_registry(self.registry)

    def take_over(
        self, spaces: dict[SpaceKey, Space], publishers: Sequence[PublisherState], incomplete_before: int
    ) -> None:
        """Hold what a snapshot held, as far as the registry that is known now lets it live."""
        self.spaces.clear()
        self.spaces.update(spaces)
        self.incomplete_before = incomplete_before
        self.publishers.take_over(publishers)
        self.set_registry(self.registry)

    def tidy(self) -> None:
        """Forget what nobody needs: empty spaces, holders without blocks, unregistered publishers.

        Not while a batch is half applied.
        """
        wanted = self._registered()
        workers = [Worker(*key) for key in self.registry.engines]
        self.publishers.forget_unregistered()
        for key, space in list(self.spaces.items()):
            if space.sweep():
                continue
            space.forget_idle_holders(workers)
            stats = space.index.stats()
            if key not in wanted and not stats.blocks and not stats.waiting:
                del self.spaces[key]

    def _is_next(self, space: Space, epoch: int, group: IndexGroup) -> bool:
        """Whether a group lies behind everything applied; a younger stream counts from its own beginning."""
        if epoch > space.source_epoch:
            space.source_epoch = epoch
            space.last_sequence = (0, 0)
        elif epoch and epoch < space.source_epoch:
            return False
        position = (group.source_sequence, group.part)
        if position <= space.last_sequence:
            return False
        space.last_sequence = position
        return True

    def _apply_group(self, space: Space, group: IndexGroup, admitted: bool, account: Account) -> Iterator[None]:
        for event in group.events:
            if not self.publishers.may_change(event.holder, group, admitted):
                self.counts.retired_generation += 1
                account.drop("retired_generation")
                continue
            try:
                for _ in space.apply(event):
                    yield
                    admitted = admitted and self.publishers.is_current(group)
                    if not self.publishers.may_change(event.holder, group, admitted):
                        break
            except EventRefusedError as error:
                self._refuse(1, str(error))
                account.reject("refused")
            else:
                self.counts.applied += 1
                account.applied += 1
        if admitted:
            self.publishers.note(group)

    def _refuse(self, events: int, reason: str) -> None:
        self.counts.refused += events
        self.on_refused(reason)

    def _registered(self) -> set[SpaceKey]:
        return spaces_of([*self.registry.engines.values(), *self.registry.pools.values()])

    def _open(self, key: SpaceKey) -> Space | None:
        space = self.spaces.get(key)
        if space is None and len(self.spaces) < self._max_spaces:
            space = self.spaces[key] = self._new_space()
        return space

    def _new_space(self) -> Space:
        return Space(self._make_index(), self.counts.blocks)

    def _retire(self, key: PublisherKey) -> None:
        source, instance_id, dp_rank = key
        holder: Holder = Worker(instance_id, dp_rank) if source == "engine" else Location(instance_id, "")
        for space in self.spaces.values():
            space.retire(holder)
