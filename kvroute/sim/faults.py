"""One simulated DP rank's misbehaviour: what becomes of its events, its messages and its replays."""

import random
import time
from collections.abc import Iterable, Sequence

from kvroute.sim.fault_names import Fault
from kvroute.sim.publisher import Frames, ReplayManner
from kvroute.sim.vllm_events import (
    OFFLOAD_CONNECTOR_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    encode_batch,
)

UNKNOWN_BLOCK = 0xDEAD_BEEF_0000_0001
FOREIGN_RANK = 31
HOUR = 3600.0
RESTARTS = ("restart", "restart-past", "clock-back")


class RankFaults:
    """Faults of one rank; without any, everything passes unchanged. seed: makes what is left to chance repeatable."""

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 1) -> None:
        self._values = {fault.name: fault.value for fault in faults}
        self._chance = random.Random(seed)
        self._messages = 0
        self._foreign = 0
        self._overtaken: Frames | None = None
        self._done: set[str] = set()
        self.clock_offset = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def buffer_steps(self) -> int | None:
        """How much the replay buffer keeps, None for the usual."""
        return int(self._values["short-replay"]) if "short-replay" in self else None

    @property
    def replay_manner(self) -> ReplayManner:
        """How replays are answered."""
        return ReplayManner(
            answers="no-replay" not in self,
            topic="no-topic" not in self,
            end="no-end" not in self and "truncated-replay" not in self,
            limit=int(self._values["truncated-replay"]) if "truncated-replay" in self else None,
            loss=self._values.get("lossy-replay", 0.0),
        )

    def now(self) -> float:
        """The engine's clock, seconds since the epoch."""
        return time.time() + self.clock_offset

    def rank_in_batches(self, dp_rank: int) -> int:
        """The rank that batches state."""
        return 0 if "wrong-rank" in self else dp_rank

    def is_unsendable(self) -> bool:
        """Whether the batch at hand is lost in the publisher."""
        return self._happens("unsendable")

    def due(self, *names: str) -> str | None:
        """The first of these faults that waits for the messages sent so far; each happens once."""
        for name in names:
            if name in self and name not in self._done and self._messages >= self._values[name]:
                self._done.add(name)
                return name
        return None

    def events(self, events: list[EngineEvent]) -> list[EngineEvent]:
        """What is published of the events of a step."""
        changed: list[EngineEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared) and "unsent-clear" in self:
                continue
            if isinstance(event, BlockRemoved):
                if self._happens("lost-removals"):
                    continue
                if "absent-removals" in self:
                    event.block_hashes = [UNKNOWN_BLOCK, *event.block_hashes]
            if isinstance(event, BlockStored) and "wrong-block-size" in self and event.block_size:
                event.block_size *= 2
                whole = len(event.token_ids) // event.block_size
                if not whole:
                    continue
                event.block_hashes = event.block_hashes[:whole]
                event.token_ids = event.token_ids[: whole * event.block_size]
                event.extra_keys = event.extra_keys[:whole] if event.extra_keys else None
            changed.append(event)
        return changed

    def wire_name(self, block_hash: bytes, medium: str) -> int | bytes:
        """How an event names a block."""
        if "bytes-offload" in self and medium == OFFLOAD_CONNECTOR_MEDIUM:
            return block_hash
        return int.from_bytes(block_hash[-8:], "big")

    def wire(self, frames: Frames) -> Iterable[Frames]:
        """What goes onto the wire for a message; everything that is not sent is in the replay buffer all the same."""
        self._messages += 1
        topic, sequence, payload = frames
        if self._happens("drop"):
            return
        if self._every("bad-frames"):
            yield from ((payload,), (topic, payload), (topic, sequence, payload, b"more"))  # type: ignore[misc]
        if self._every("poison"):
            yield (topic, sequence, b"\xc1" + payload[: len(payload) // 2])
            return
        if self._every("reorder") and self._overtaken is None:
            self._overtaken = frames
            return
        yield frames
        if self._overtaken is not None:
            earlier, self._overtaken = self._overtaken, None
            yield earlier
        if self._every("duplicate"):
            yield frames
        if self._every("foreign-rank"):
            yield (topic, self._foreign.to_bytes(8, "big"), encode_batch(self.now(), [], FOREIGN_RANK))
            self._foreign += 1

    def _happens(self, name: str) -> bool:
        return name in self._values and self._chance.random() < self._values[name]

    def _every(self, name: str) -> bool:
        return name in self._values and self._messages % int(self._values[name]) == 0
