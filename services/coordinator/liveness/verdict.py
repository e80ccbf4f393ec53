"""From single health checks to a verdict about an engine (pure)."""

import re
from dataclasses import dataclass

from schemas.liveness import LivenessState

# vLLM: vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0; older releases have the bare gauge, 1 for asleep.
_SLEEP_SERIES = re.compile(
    r'^(?:vllm:)?engine_sleep_state(?:\{[^}]*?sleep_state="(?P<word>\w+)"[^}]*\}|\{[^}]*\})?\s+(?P<value>[\d.eE+]+)$',
    re.MULTILINE,
)
_GIVES_CACHE_UP = frozenset({"weights_offloaded", "discard_all", "asleep"})


@dataclass(slots=True)
class EngineHealth:
    """What the checks of one URL have said. state None: not enough of them yet. since: when it took this state."""

    state: LivenessState | None = None
    since: float = 0.0
    reason: str = ""
    failures: int = 0
    asleep: bool = False

    def observe(self, problem: str, needed: int, now: float) -> bool:
        """Take a check's result (an empty problem is a success); whether the state changed. needed: failures in a row
        that make an engine dead."""
        if problem:
            self.failures += 1
            self.reason = problem
            return self.failures >= needed and self._become(LivenessState.DEAD, now)
        self.failures = 0
        if not self.asleep:
            self.reason = ""
            return self._become(LivenessState.ALIVE, now)
        self.reason = "asleep: its KV cache is given up until it wakes"
        return self._become(LivenessState.ASLEEP, now)

    def _become(self, state: LivenessState, now: float) -> bool:
        if self.state is state:
            return False
        self.state, self.since = state, now
        return True


def is_asleep(metrics_text: str) -> bool:
    """Whether an engine's /metrics page says that it sleeps (`POST /sleep`), at whatever level."""
    for series in _SLEEP_SERIES.finditer(metrics_text):
        word, on = series["word"], float(series["value"]) > 0
        if on and (word is None or word in _GIVES_CACHE_UP):
            return True
    return False
