"""The replay's side of a stream: what to ask for, what the answers mean, when to give up (pure).

A replay is asked from the newest message taken on, that one included: when it comes back unchanged the history is the
same; when it does not, the publisher is another process than before, whatever its numbers say. A replay may lose
messages in its middle and end without a mark, so a hole is asked for again as long as that brings anything. What cannot
be had is missing for good, and said to be.
"""

from dataclasses import dataclass

from services.ingest.arrivals import Arrival, Incoming, Round, Verdict
from services.ingest.stream import Stream

NO_ANSWER = "the replay endpoint does not answer"


@dataclass(frozen=True, slots=True)
class RepairPolicy:
    """attempts without an answer before it is given up, and asked_again: without progress although there are answers (a
    replay loses messages at random). Seconds: first_pause between them (then doubled), confirm after connecting, verify
    between looks at an idle publisher."""

    attempts: int = 3
    asked_again: int = 6
    first_pause: float = 0.2
    confirm: float = 1.0
    verify: float = 15.0


def due(stream: Stream, now: float, last_message_at: float, policy: RepairPolicy) -> bool:
    """Whether a replay should begin: a repair, or a look at a publisher that has been quiet (its last message may be
    lost). Times in seconds since the epoch."""
    if not stream.repairable or not stream.connected or stream.round is not None or stream.starved:
        return False
    if stream.repairing:
        return now >= stream.attempt_at
    quiet = stream.confirm or now >= last_message_at + policy.verify
    return now >= stream.verify_at and (quiet or stream.verify_at == 0.0)


def begin_round(stream: Stream) -> int:
    """Begin a replay; the number to ask from."""
    whole = stream.retry_whole and not stream.repairing and stream.last_seq is not None
    start = 0 if whole or stream.last_seq is None else stream.last_seq
    stream.round = Round(start, whole=whole)
    return start


def resync(stream: Stream) -> list[Verdict]:
    """Begin a new generation from all that the publisher can still tell (an operator's, or another service's, wish)."""
    dropped = stream.end_life()
    stream.ask()
    return dropped


def replayed(stream: Stream, message: Incoming, *, room: bool = True) -> list[Verdict]:
    """Judge a message of the replay under way; the replay is over when ``stream.round`` is None afterwards."""
    current = stream.round
    if current is None:
        return [Verdict(message, Arrival.REPLAYED)]
    if not room:
        stream.round = None
        return stream.starve(message)
    first, current.answered = not current.answered, True
    dropped: list[Verdict] = []
    if current.whole and first:
        if message.seq > (stream.first_seq or 0):
            stream.retry_whole = False
            stream.round = None
            return [Verdict(message, Arrival.REPLAYED)]
        dropped = _new_life(stream, current)
    last = stream.last_seq
    if last is not None and message.seq <= last:
        return _overlap(stream, current, message)
    if last is not None and stream.unverified and not current.overlap:
        dropped = _new_life(stream, current)
        last = None
    stream.highest = max(message.seq, stream.highest if stream.highest is not None else -1)
    if last is None:
        # The oldest that the publisher still has, unless something older waits here.
        current.progressed = True
        lowest = stream.held.lowest()
        older = stream.held.take(lowest) if lowest is not None and lowest < message.seq else None
        if older is None:
            return dropped + stream.skip_to(message)
        dropped += stream.skip_to(older)
        last = stream.last_seq or older.seq
        if message.seq <= last:
            return [*dropped, Verdict(message, Arrival.REPLAYED)]
    if message.seq == last + 1:
        current.progressed = True
        return dropped + stream.take(message)
    stream.repairing = True
    return dropped if stream.held.add(message) else [*dropped, Verdict(message, Arrival.REPLAYED)]


def round_ended(stream: Stream, complete: bool, now: float, policy: RepairPolicy) -> list[Verdict]:
    """The replay is over. complete: its end mark came; otherwise nothing came for a while, or the connection failed."""
    current, stream.round = stream.round, None
    if current is None:
        return []
    stream.verify_at = now + (policy.confirm if stream.confirm else policy.verify)
    if complete:
        stream.confirm = False
    verdicts: list[Verdict] = []
    if stream.last_seq is not None and stream.unverified and complete and not current.answered:
        # Not even the newest message taken is there: another process, whose numbers are lower still.
        verdicts += stream.end_life()
        stream.ask()
        return verdicts
    if current.progressed:
        stream.attempts = 0
    if has_hole(stream):
        stream.repairing = True
        if current.progressed or _may_try_again(stream, now, policy, current.answered):
            return verdicts
        return verdicts + _give_up(stream, current.answered)
    if not complete and current.progressed:
        stream.repairing = True
        return verdicts
    if not complete and not current.answered and stream.repairing:
        if not _may_try_again(stream, now, policy, answered=False):
            if stream.unverified:
                stream.lost(NO_ANSWER)
            _settle(stream, retry_whole=True)
        return verdicts
    if stream.repairing and stream.last_seq is None:
        if stream.new_life:
            stream.announce(now)
        stream.heard = True
    _settle(stream, stream.retry_whole)
    return verdicts


def has_hole(stream: Stream) -> bool:
    """Whether a number is known to exist that was not taken, although a later one may have been."""
    if len(stream.held):
        return True
    return stream.highest is not None and (stream.last_seq is None or stream.highest > stream.last_seq)


def _overlap(stream: Stream, current: Round, message: Incoming) -> list[Verdict]:
    known = stream.history.fingerprint(message.seq)
    if known is None or message.seq != stream.last_seq or known == message.fingerprint:
        if message.seq == stream.last_seq:
            current.overlap = True
            stream.unverified = False
        return [Verdict(message, Arrival.REPLAYED)]
    # The same number names another message: another process, whose history has to be asked for from the start.
    dropped = stream.end_life()
    stream.ask()
    return [*dropped, Verdict(message, Arrival.REPLAYED)]


def _new_life(stream: Stream, current: Round) -> list[Verdict]:
    """Begin a new life in the middle of a replay, which goes on."""
    dropped = stream.end_life()
    stream.ask()
    stream.round = current
    current.whole = False
    return dropped


def _may_try_again(stream: Stream, now: float, policy: RepairPolicy, answered: bool) -> bool:
    stream.attempts += 1
    stream.attempt_at = now + policy.first_pause * (1 if answered else 2 ** (stream.attempts - 1))
    return stream.attempts < (policy.asked_again if answered else policy.attempts)


def _give_up(stream: Stream, answers: bool) -> list[Verdict]:
    """Leave the next hole open; all holes when the replay does not answer at all."""
    verdicts: list[Verdict] = []
    unsure = stream.unverified
    while has_hole(stream):
        lowest = stream.held.lowest()
        waiting = stream.held.take(lowest) if lowest is not None else None
        if waiting is None:
            _write_off(stream)
            break
        verdicts += stream.skip_to(waiting)
        if answers and has_hole(stream):
            stream.ask()
            return verdicts
    if not answers and unsure:
        stream.lost(NO_ANSWER)
    _settle(stream, retry_whole=not answers and stream.incomplete)
    return verdicts


def _write_off(stream: Stream) -> None:
    """Numbers that are known to exist, and of which nothing is here, will not come."""
    if stream.highest is not None:
        stream.miss(stream.highest - (stream.last_seq if stream.last_seq is not None else -1))
        stream.last_seq = stream.highest
        stream.heard = True


def _settle(stream: Stream, retry_whole: bool) -> None:
    stream.repairing = False
    stream.unverified = False
    stream.retry_whole = retry_whole
    stream.attempts = 0
