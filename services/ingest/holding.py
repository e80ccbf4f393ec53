"""Messages that wait for what comes before them: by number, bounded in messages and bytes (pure)."""

from dataclasses import dataclass

from services.ingest.arrivals import Incoming

MAX_SEQUENCE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How much may wait per publisher."""

    messages: int = 20_000
    bytes: int = 16 * 1024 * 1024


class Held:
    """What waits. ``bytes`` is the sum of the messages' sizes."""

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._messages: dict[int, Incoming] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Incoming) -> bool:
        """Keep a message; False when it is there already or there is no room."""
        if message.seq in self._messages or len(self._messages) >= self._limits.messages:
            return False
        if self.bytes + message.size > self._limits.bytes:
            return False
        self._messages[message.seq] = message
        self.bytes += message.size
        return True

    def take(self, seq: int) -> Incoming | None:
        """Take out the message of a number."""
        message = self._messages.pop(seq, None)
        if message is not None:
            self.bytes -= message.size
        return message

    def lowest(self) -> int | None:
        """The lowest number that waits."""
        return min(self._messages) if self._messages else None

    def drop_up_to(self, seq: int) -> list[Incoming]:
        """Take out everything at or below a number."""
        return [message for number in sorted(self._messages) if number <= seq and (message := self.take(number))]

    def drop_all(self) -> list[Incoming]:
        """Take out everything."""
        return self.drop_up_to(MAX_SEQUENCE)
