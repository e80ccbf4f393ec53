"""A number at or below the newest one taken: the same message again, one that comes too late, or a new life (pure)."""

from typing import TYPE_CHECKING

from services.ingest.arrivals import Arrival, Incoming, Verdict
from services.ingest.history import History

if TYPE_CHECKING:
    from services.ingest.stream import Stream

LATE_MESSAGES_OF_A_NEW_LIFE = 16


def backward(stream: "Stream", message: Incoming) -> list[Verdict]:
    """Judge a live message whose number went back.

    Payloads carry a time: one that is older than the newest taken comes too late. A first message that only a warm
    cache can have sent means that a relay began to count anew, not the publisher.
    """
    if stream.history.has(message.seq, message.fingerprint):
        return [Verdict(message, Arrival.DUPLICATE)]
    if stream.history.is_older(message.published_at) and not _repeats_in_order(stream, message):
        stream.verify_at = 0.0
        return [Verdict(message, Arrival.LATE)]
    if message.warm and message.seq == 0:
        return _numbers_began_anew(stream, message)
    dropped = stream.end_life()
    stream.highest = message.seq
    if message.seq in stream.first_numbers or not stream.repairable:
        return dropped + stream.skip_to(message)
    stream.ask()
    return dropped + stream.wait(message)


def _numbers_began_anew(stream: "Stream", message: Incoming) -> list[Verdict]:
    stream.counter_resets += 1
    stream.lost("its numbers began anew, what passed meanwhile is unknown")
    dropped = [Verdict(waiting, Arrival.OLD_LIFE) for waiting in stream.held.drop_all()]
    stream.last_seq, stream.highest, stream.missed, stream.missed_before_join = None, 0, 0, 0
    stream.history = History()
    return dropped + stream.take(message, Arrival.COUNTER_RESET)


def _repeats_in_order(stream: "Stream", message: Incoming) -> bool:
    """Whether so many 'late' messages came in a row that it is the publisher's clock that went back."""
    expected, count = stream.late
    count = count + 1 if message.seq == expected else 1
    stream.late = (message.seq + 1, count)
    return count >= LATE_MESSAGES_OF_A_NEW_LIFE
