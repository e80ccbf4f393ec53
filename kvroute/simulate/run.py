"""One simulation: requests of a trace are placed by the real code, engines answer with events that come late."""

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from random import Random
from typing import Any

from kvroute.simulate.engine import BlockCache, Node, Served
from kvroute.simulate.trace import TraceRequest
from schemas.blocks import PLAIN_ROOT
from services.router.index import Choice, create_index
from services.router.index.port import NPU, Candidate, PrefixIndex
from services.router.placement.cost import CostOptions
from services.router.placement.decide import decide
from services.router.placement.load import LoadAccount
from services.router.placement.models import CandidateView, PlacementRequest
from services.router.placement.policies import DEFAULT_POLICY
from services.router.placement.prediction import Prediction

_NOWHERE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Options:
    """nodes alike but for slow_nodes, which have a third of the rate. capacity: blocks a node keeps. rate: tokens/s.

    event_delay: seconds until the router hears of blocks. event_loss: share of messages that never arrive.
    prediction: seconds that routed blocks count as present. clear_at: seconds, node 0 loses its cache (None: never).
    """

    nodes: int = 8
    policy: str = DEFAULT_POLICY
    block_size: int = 512
    capacity: int = 8000
    rate: float = 5500.0
    event_delay: float = 0.02
    event_loss: float = 0.0
    load_weight: float = 0.25
    prediction: float = 5.0
    slow_nodes: int = 0
    clear_at: float | None = None
    index: Choice = "auto"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """hit_ratio: of prompt tokens. ideal_hit_ratio: of one cache as large as all together. Times in seconds.

    busiest_to_mean: computed tokens. cleared_work: computed tokens of node 0 in the minute after its cache was lost,
    against the mean node's. cleared_requests: its requests in the minute after that one, likewise.
    """

    requests: int
    hit_ratio: float
    ideal_hit_ratio: float
    mean_ttft: float
    p99_ttft: float
    busiest_to_mean: float
    cleared_work: float | None
    cleared_requests: float | None

    @property
    def reached(self) -> float:
        """Share of the ideal hits that were reached."""
        return self.hit_ratio / self.ideal_hit_ratio if self.ideal_hit_ratio else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"reached": self.reached}


class _Router:
    """The router's side: index, load account and predictions, fed by messages that are due."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.index: PrefixIndex = create_index(options.index, 16_000_000, 1_000_000)
        self.load = LoadAccount(lease_seconds=1e9, max_leases=10_000_000)
        self.prediction = Prediction(options.prediction)
        self.random = Random(options.seed)
        self.cost = CostOptions(load_weight=options.load_weight)
        self.names = [f"node-{number}" for number in range(options.nodes)]
        self.candidates = [Candidate(number + 2) for number in range(options.nodes)]
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def later(self, at: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (at, next(self._order), action))

    def advance(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def place(self, request: TraceRequest, number: int, rates: Sequence[float]) -> int:
        now, size = request.at, self.options.block_size
        keys = array("Q", request.blocks)
        found = self.index.match_contents(keys, PLAIN_ROOT, self.candidates, _NOWHERE)
        views = [
            CandidateView(
                name,
                coverage=coverage,
                predicted_blocks=self.prediction.leading_blocks((name, 0), keys, now),
                queued_tokens=self.load.of((name, 0)).prefill_tokens,
                rate=rate,
            )
            for name, coverage, rate in zip(self.names, found, rates, strict=True)
        ]
        first = request.blocks[0] if request.blocks else number
        asked = PlacementRequest(request.tokens, size, len(request.blocks), first_key=first)
        decision = decide(asked, views, self.random, self.options.policy, turn=number, cost=self.cost)
        chosen = decision.chosen
        self.load.charge(str(number), chosen.view.key, chosen.prefill_tokens, len(request.blocks), now)
        self.prediction.routed(chosen.view.key, keys, now)
        return self.names.index(chosen.view.instance_id)

    def hear(self, node: int, request: TraceRequest, served: Served) -> None:
        """Messages of a finished request: one store, one removal; each may be lost."""
        at, holder = served.finish + self.options.event_delay, node + 2
        parent = request.blocks[served.hits - 1] if served.hits else None
        stored = array("Q", served.stored).tobytes()
        removed = array("Q", served.evicted).tobytes()
        if stored and self.random.random() >= self.options.event_loss:
            call = self.index.stored
            self.later(at, lambda: call(holder, NPU, holder, stored, parent, stored, PLAIN_ROOT, holder, False))
        if removed and self.random.random() >= self.options.event_loss:
            self.later(at, lambda: self.index.removed(holder, NPU, holder, removed))


def simulate(
    trace: Sequence[TraceRequest], options: Options, progress: Callable[[int], object] = lambda done: None
) -> Outcome:
    """Place every request of a trace. progress: called with the number of requests done. Raises ValueError."""
    if options.nodes < 1 or options.slow_nodes > options.nodes:
        raise ValueError(
            f"nodes is {options.nodes}, slow_nodes {options.slow_nodes}: at least 1 node, no more slow ones"
        )
    router = _Router(options)
    rates = [options.rate / (3 if number < options.slow_nodes else 1) for number in range(options.nodes)]
    nodes = [Node(rate, BlockCache(options.capacity)) for rate in rates]
    ideal = BlockCache(options.capacity * options.nodes)
    hits = ideal_hits = 0
    work, later = [0] * options.nodes, [0] * options.nodes
    waits: list[float] = []
    cleared = options.clear_at is None
    for number, request in enumerate(trace):
        if options.clear_at is not None and not cleared and request.at >= options.clear_at:
            cleared = True
            nodes[0].cache.blocks.clear()
            router.index.cleared(2, (NPU,))
            router.prediction.forget((router.names[0], 0))
        router.advance(request.at)
        chosen = router.place(request, number, rates)
        served = nodes[chosen].serve(request, options.block_size)
        router.hear(chosen, request, served)
        router.later(served.finish, lambda receipt=str(number): router.load.complete(receipt))  # type: ignore[misc]
        hits += served.hits
        ideal_hits += ideal.leading(request.blocks)
        ideal.use(request.blocks)
        waits.append(served.finish - request.at)
        since = -1.0 if options.clear_at is None else request.at - options.clear_at
        if 0 <= since < 60:
            work[chosen] += request.tokens - served.hits * options.block_size
        elif 60 <= since < 120:
            later[chosen] += 1
        progress(number + 1)
    tokens = sum(request.tokens for request in trace)
    computed = [node.computed for node in nodes]
    waits.sort()
    return Outcome(
        requests=len(trace),
        hit_ratio=hits * options.block_size / tokens,
        ideal_hit_ratio=ideal_hits * options.block_size / tokens,
        mean_ttft=sum(waits) / len(waits),
        p99_ttft=waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        busiest_to_mean=_against_mean(computed, max(computed)) or 1.0,
        cleared_work=_against_mean(work, work[0]),
        cleared_requests=_against_mean(later, later[0]),
    )


def _against_mean(values: Sequence[int], value: int) -> float | None:
    return value * len(values) / sum(values) if sum(values) else None
