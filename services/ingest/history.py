"""What is remembered of the messages that were taken: enough to tell a repeat from a new life (pure)."""

from array import array

REMEMBERED = 256


class History:
    """Fingerprints (a hash of the payload) of the newest messages, and the newest time in them.

    Payloads carry a time, so a new life of a publisher never repeats an old message.
    """

    __slots__ = ("_prints", "_seqs", "published_at")

    def __init__(self) -> None:
        self._seqs = array("Q", [0]) * REMEMBERED
        self._prints = array("Q", [0]) * REMEMBERED
        self.published_at = 0.0

    def add(self, seq: int, fingerprint: int, published_at: float) -> None:
        """A message was taken. published_at: seconds since the epoch, 0 unknown. fingerprint 0: unknown."""
        self._seqs[seq % REMEMBERED] = seq + 1
        self._prints[seq % REMEMBERED] = fingerprint
        self.published_at = max(self.published_at, published_at)

    def fingerprint(self, seq: int) -> int | None:
        """The fingerprint under this number, None when it is not remembered."""
        position = seq % REMEMBERED
        return (self._prints[position] or None) if self._seqs[position] == seq + 1 else None

    def has(self, seq: int, fingerprint: int) -> bool:
        """Whether this very message was taken."""
        return self.fingerprint(seq) == fingerprint

    def is_older(self, published_at: float) -> bool:
        """Whether a message with this time was published before the newest one taken (False when a time is unknown)."""
        return bool(published_at and self.published_at) and published_at <= self.published_at
