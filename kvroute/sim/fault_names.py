"""The ways in which a simulated engine can misbehave, each seen in the field, one line each."""

import difflib
from dataclasses import dataclass

FAULTS: dict[str, tuple[float | None, str]] = {
    "restart": (50, "after N messages the process restarts in place: empty cache, numbers from 0, no event says so"),
    "restart-past": (50, "the same, and the new process has passed the old number before anybody hears of it"),
    "clock-back": (50, "the same as restart, and the machine's clock went back by an hour"),
    "relay-reset": (50, "after N messages the numbers begin anew, as behind a restarted relay; the cache stays warm"),
    "blink": (50, "after N messages the event socket is gone for a second; what is published meanwhile is not sent"),
    "drop": (0.2, "each message is lost on its way with probability P; the replay buffer has it"),
    "unsendable": (
        0.1,
        "each message is lost in the publisher with probability P: its number is used, no replay has it",
    ),
    "duplicate": (3, "every Nth message is sent twice"),
    "reorder": (3, "every Nth message is overtaken by the next one"),
    "poison": (5, "every Nth message is spoilt on its way and cannot be decoded"),
    "bad-frames": (5, "every Nth message is preceded by message parts that are no message (1, 2 and 4 frames)"),
    "wrong-rank": (None, "every batch says data-parallel rank 0"),
    "foreign-rank": (3, "every Nth message is followed by one of another rank that counts for itself"),
    "no-replay": (None, "the replay endpoint takes questions and never answers"),
    "short-replay": (5, "the replay buffer keeps the newest N messages"),
    "truncated-replay": (5, "a replay stops after N messages, without its end mark"),
    "lossy-replay": (0.05, "a replay loses messages in its middle with probability P; its end mark comes"),
    "no-end": (None, "a replay sends all it has and no end mark"),
    "no-topic": (None, "replies of a replay have no topic frame (vLLM 0.25 and older)"),
    "wrong-block-size": (None, "events state twice the block size of the engine"),
    "bytes-offload": (None, "offload events carry 32-byte hashes, no tokens and no size (vLLM 0.23 and older)"),
    "reannounce": (None, "blocks that a prompt hits are announced again (kv_cache_report_mode=full)"),
    "lost-removals": (1.0, "removals are never published, with probability P each"),
    "absent-removals": (None, "each removal names an unknown block first"),
    "unsent-clear": (None, "an emptied cache publishes nothing"),
}


@dataclass(frozen=True)
class Fault:
    """One way to misbehave. value: how often or how much, 0 for a fault without a measure."""

    name: str
    value: float = 0.0


def parse_fault(text: str) -> Fault:
    """Read ``NAME`` or ``NAME=VALUE``. Raises ValueError naming what is wrong and what is known."""
    name, _, given = text.partition("=")
    if name not in FAULTS:
        close = difflib.get_close_matches(name, FAULTS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(FAULTS)}"
        raise ValueError(f"unknown fault {name!r}, {hint}")
    default, _ = FAULTS[name]
    if default is None:
        if given:
            raise ValueError(f"fault {name} takes no value, got {given!r}")
        return Fault(name)
    if not given:
        return Fault(name, default)
    try:
        value = float(given)
    except ValueError:
        raise ValueError(f"fault {name}: {given!r} is not a number") from None
    is_probability = default <= 1
    if not value > 0 or (is_probability and value > 1) or (not is_probability and value != int(value)):
        kind = "a probability above 0, at most 1" if is_probability else "a whole number from 1"
        raise ValueError(f"fault {name}: the value must be {kind}, got {given}")
    return Fault(name, value)


def describe_faults() -> list[str]:
    """A line per fault, for --help."""
    lines = []
    for name, (default, text) in FAULTS.items():
        measure = "" if default is None else f"=P ({default:g})" if default <= 1 else f"=N ({default:g})"
        lines.append(f"{name}{measure}: {text}")
    return lines
