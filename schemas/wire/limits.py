"""How much a publisher may send; everything above is refused before memory is spent on it."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of one message and of what is in it.

    payload_bytes: of a message; more refuses the message (TOO_LARGE). events: of a batch; more refuses the message
    (LIMIT). The others refuse one event (LIMIT). hashes: of an event. tokens: of an event. block_keys: extra keys of a
    block. depth: lists in lists inside an extra key. text: of one text field or extra key, in characters.
    """

    payload_bytes: int = 16 * 1024 * 1024
    events: int = 65_536
    hashes: int = 65_536
    tokens: int = 4_194_304
    block_keys: int = 256
    depth: int = 8
    text: int = 4_096


DEFAULT_LIMITS: Final = Limits()
