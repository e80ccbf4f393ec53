"""One state note as a line for people or for programs."""

import json
from datetime import UTC, datetime

import msgspec
from rich.text import Text

from schemas.events import STATES, StateNote

STYLES = {
    "matched": "bold green",
    "confirmed": "green",
    "applied": "cyan",
    "queued": "yellow",
    "offload_cached": "yellow",
    "dropped": "bold red",
    "pending_expired": "magenta",
}
STATE_WIDTH = max(map(len, STATES))


def as_json(note: StateNote) -> str:
    """Every field, in one line."""
    return json.dumps(msgspec.structs.asdict(note), ensure_ascii=False)


def as_text(note: StateNote) -> Text:
    """Time, state and what is not empty, coloured by state (a plain console drops the colours)."""
    at = datetime.fromtimestamp(note.at, UTC).strftime("%H:%M:%S.%f")[:-3]
    publisher = f"{note.source} {note.instance_id} dp{note.dp_rank}" if note.source == "engine" else note.instance_id
    facts = {
        "tenant": note.tenant if note.tenant != "default" else "",
        "event": note.event_type,
        "medium": note.medium,
        "backend": note.backend_id,
        "blocks": note.blocks,
        "seq": note.seq,
        "reason": note.reason,
        "hashes": ",".join(note.preview),
    }
    line = Text(f"{at} ", style="dim")
    line.append(note.state.ljust(STATE_WIDTH), style=STYLES.get(note.state, ""))
    line.append(f"  {note.service:<8} {note.model}  {publisher}  ", style="default")
    line.append(" ".join(f"{key}={value}" for key, value in facts.items() if value), style="default")
    return line
