"""What engines really had cached, beside what was promised: false hits and false misses per engine rank.

A response tells its ``cached_tokens``; whoever sent the request adds what this router had promised for it. Pure.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from schemas.registry import EngineRecord
from services.router.encodings import BodyRefusedError

MAX_RESPONSES = 1000
MAX_TOKENS = 1 << 40
RATE_WEIGHT = 0.02
Rank = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Response:
    """One response of an engine. promised: tokens that the answer to its query had promised there; cached: tokens the
    engine took from its caches. prompt: tokens of its prompt, 0 unknown."""

    rank: Rank
    promised: int
    cached: int
    prompt: int = 0


@dataclass(slots=True)
class Drift:
    """The sums for one engine rank, in tokens, and the share of the last responses (exponential average).

    false_hits: promised, but not had; false_misses: had, but not promised.
    """

    responses: int = 0
    promised: int = 0
    cached: int = 0
    false_hits: int = 0
    false_misses: int = 0
    false_hit_rate: float = 0.0
    false_miss_rate: float = 0.0

    def add(self, response: Response, block_size: int) -> None:
        """Count a response."""
        promised = usable(response.promised, response.prompt, block_size)
        false_hits = max(0, promised - response.cached)
        # Engines may use a part of a block that only they know of; whole blocks are what an index can promise.
        false_misses = max(0, response.cached - promised) // block_size * block_size
        self.responses += 1
        self.promised += promised
        self.cached += response.cached
        self.false_hits += false_hits
        self.false_misses += false_misses
        weight = max(RATE_WEIGHT, 1 / self.responses)
        self.false_hit_rate += weight * ((false_hits / promised if promised else 0.0) - self.false_hit_rate)
        had = response.cached
        self.false_miss_rate += weight * ((false_misses / had if had else 0.0) - self.false_miss_rate)


def usable(promised: int, prompt: int, block_size: int) -> int:
    """Tokens of a promise that an engine can use: it always computes the last token itself, so the last block of a
    prompt of whole blocks is computed anew."""
    return min(promised, (prompt - 1) // block_size * block_size) if prompt else promised


class Feedback:
    """The drift of every registered engine rank."""

    def __init__(self, engines: Callable[[], Mapping[Rank, EngineRecord]]) -> None:
        self._engines = engines
        self._drift: dict[Rank, Drift] = {}

    def take(self, responses: Collection[Response]) -> int:
        """Count responses; how many were of registered ranks. The others are not counted."""
        engines, taken = self._engines(), 0
        for response in responses:
            record = engines.get(response.rank)
            if record is not None:
                self._drift.setdefault(response.rank, Drift()).add(response, record.block_size)
                taken += 1
        return taken

    def of(self, rank: Rank) -> Drift:
        """What is known of a rank."""
        return self._drift.get(rank, Drift())

    def collect(self) -> Iterator[Metric]:
        """Metrics; ranks that left take their series along."""
        engines = self._engines()
        for rank in self._drift.keys() - engines.keys():
            del self._drift[rank]
        labels = ("instance_id", "dp_rank")
        sums = {
            "responses": "responses reported",
            "promised": "tokens promised for them",
            "cached": "tokens that the engine took from its caches",
            "false_hits": "tokens promised and not had",
            "false_misses": "tokens had and not promised",
        }
        for name, text in sums.items():
            unit = "" if name == "responses" else "_tokens"
            family = CounterMetricFamily(f"kvroute_router_feedback_{name}{unit}", text, labels=labels)
            for (instance_id, dp_rank), drift in self._drift.items():
                family.add_metric((instance_id, str(dp_rank)), getattr(drift, name))
            yield family
        for name in ("false_hit_rate", "false_miss_rate"):
            rate = GaugeMetricFamily(f"kvroute_router_{name}", "Share of the last responses' tokens", labels=labels)
            for (instance_id, dp_rank), drift in self._drift.items():
                rate.add_metric((instance_id, str(dp_rank)), getattr(drift, name))
            yield rate

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance."""
        return iter(())


def read_feedback(body: Mapping[str, Any], promise_of: Callable[[str], Response | None]) -> list[Response]:
    """The responses of a POST /v1/feedback body: one, or a list under ``responses``. Raises BodyRefusedError.

    promise_of: what a receipt promised (rank, tokens, prompt length), None for an unknown one.
    """
    listed = body.get("responses", [body])
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BodyRefusedError("responses must be a list of objects")
    if len(listed) > MAX_RESPONSES:
        raise BodyRefusedError(f"responses has {len(listed)} entries, at most {MAX_RESPONSES} are accepted", 413)
    return [_read(one, promise_of) for one in listed]


def _read(fields: Mapping[str, Any], promise_of: Callable[[str], Response | None]) -> Response:
    cached = _number(fields, "cached_tokens", None)
    receipt = fields.get("receipt_id")
    if receipt is not None:
        promise = promise_of(receipt) if isinstance(receipt, str) else None
        if promise is None:
            raise BodyRefusedError("receipt_id is unknown or too old; give instance_id and promised_tokens", 404)
        return Response(promise.rank, promise.promised, cached, promise.prompt)
    instance_id = fields.get("instance_id")
    if not isinstance(instance_id, str) or not instance_id:
        raise BodyRefusedError("instance_id is missing: the instance that answered")
    rank = (instance_id, _number(fields, "dp_rank", 0))
    return Response(rank, _number(fields, "promised_tokens", None), cached, _number(fields, "prompt_tokens", 0))


def _number(fields: Mapping[str, Any], name: str, default: int | None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        problem = "is missing" if value is None else "must be an integer from 0"
        raise BodyRefusedError(f"{name} {problem}")
    return value
