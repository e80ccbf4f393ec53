"""The engines' health as the coordinator writes it to NATS KV, seen by whoever needs it."""

from collections.abc import Callable

from nats.js import JetStreamContext

from schemas.liveness import Liveness, LivenessState, load_liveness
from schemas.subjects import LIVENESS_BUCKET, engine_key
from services.runtime.kv_watch import KvWatch
from services.runtime.logging import get_logger

VOID_SECONDS = 30.0

log = get_logger("liveness")


class LivenessView:
    """Follows the bucket. on_change: told whenever a record was put or removed.

    A verdict "dead" or "asleep" that is not repeated for VOID_SECONDS is void: nobody checks any more, so nothing is
    known.
    """

    def __init__(self, js: JetStreamContext, on_change: Callable[[], None] = lambda: None) -> None:
        self._watch = KvWatch(
            js, LIVENESS_BUCKET, lambda key, body: load_liveness(body), lambda records: on_change(), _report
        )

    def start(self) -> None:
        """Begin to watch; what is not known yet counts as unknown."""
        self._watch.begin()

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        await self._watch.stop()

    def of(self, instance_id: str, dp_rank: int) -> Liveness | None:
        """What is known of an engine rank now, None for nothing."""
        key = engine_key(instance_id, dp_rank)
        record = self._watch.records.get(key)
        if record is None or (record.state is not LivenessState.ALIVE and self._watch.age(key) > VOID_SECONDS):
            return None
        return record

    def is_dead(self, instance_id: str, dp_rank: int) -> bool:
        """Whether an engine rank does not answer its health check."""
        record = self.of(instance_id, dp_rank)
        return record is not None and record.state is LivenessState.DEAD


def _report(key: str, problem: str) -> None:
    log.warning("liveness_record_refused", key=key, problem=problem[:200])
