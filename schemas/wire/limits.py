"""How much a publisher may send in one message; everything above is refused before memory is spent on it."""

from dataclasses import dataclass
from typing import Final

MAX_EVENTS: Final = 65_536
MAX_HASHES: Final = 65_536
MAX_TOKENS: Final = 4_194_304
MAX_KEYS: Final = 256
MAX_TEXT: Final = 4_096


@dataclass(frozen=True, slots=True)
class Limits:
    """payload_bytes: the largest payload. text: the longest text of a field, in characters.

    Lists are limited by the decoders themselves: MAX_EVENTS events a batch, MAX_HASHES hashes and MAX_TOKENS tokens an
    event, MAX_KEYS extra keys a block. Nesting is limited by the typed decoders, which build nothing they do not know.
    """

    payload_bytes: int = 16 * 1024 * 1024
    text: int = MAX_TEXT


DEFAULT_LIMITS: Final = Limits()
