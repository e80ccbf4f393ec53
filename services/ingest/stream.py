"""Sequence and generation of one publisher: which messages go on, in which order, and what is missing (design 6; pure).

Within a generation numbers are consecutive. A hole is repaired by a replay, where the publisher has one: what is newer
waits meanwhile (services/ingest/repair.py has the replay's side). A number that was seen before is the same message
again (equal payload), a message that comes too late (its own time is older), or the sign of a new life of the
publisher. A new life is a new generation: everything the publisher held is gone, with no event sent.

Every message that is given in comes back exactly once, as a Verdict, at once or when its waiting ends.
"""

from schemas.streams import StreamState
from services.ingest.arrivals import Arrival, Incoming, Lifetime, Round, Verdict
from services.ingest.backward import backward
from services.ingest.history import History
from services.ingest.holding import Held, HoldLimits
from services.ingest.stream_words import coverage_of, reason_of, state_of

MAX_CLOCK_SKEW_MS = 300_000


class Stream:
    """The bookkeeping of one socket.

    A primary stream owns the generation: its new life raises it. A further socket of the same instance begins anew on
    its own, and is gapped when the primary's new generation has taken its holdings away. repairable: the publisher
    replays.

    first_seq, last_seq: taken in the current life, None before its first message; highest: known to exist. missed:
    numbers of this life that will not come; missed_before_join: those of them before the first message. gaps, restarts,
    counter_resets, missed_total, repaired: since start. repairing: newer messages wait for a replay. starved: messages
    were turned away because nothing can be sent on. unverified: the connection was away, or this process, and nothing
    proves yet that the publisher is the same process still. retry_whole: what is missing could not be asked for, and
    may be later. attempt_at, verify_at: when the next replay is due, confirm: one soon after connecting, in case a
    message passed before the subscription counted.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        *,
        primary: bool = True,
        repairable: bool = False,
        limits: HoldLimits | None = None,
    ) -> None:
        self.lifetime = lifetime
        self.primary = primary
        self.repairable = repairable
        # vLLM counts from 0, the memcache MetaService from 1.
        self.first_numbers = (0,) if repairable else (0, 1)
        self.generation = lifetime.generation
        self.held = Held(limits or HoldLimits())
        self.gaps = 0
        self.missed_total = 0
        self.restarts = 0
        self.counter_resets = 0
        self.repaired = 0
        self.connected = False
        self.lost_connection = False
        self.round: Round | None = None
        self.new_life = False
        self.attempt_at = self.verify_at = 0.0
        self.confirm = False
        self.begin()

    def begin(self) -> None:
        """Forget the position: numbers begin anew. What waits is the caller's to take out first."""
        self.first_seq: int | None = None
        self.last_seq: int | None = None
        self.highest: int | None = None
        self.history = History()
        self.missed = 0
        self.missed_before_join = 0
        self.why = ""
        self.repairing = False
        self.attempts = 0
        self.starved = False
        self.unverified = False
        self.heard = False
        self.retry_whole = False
        self.late = (-1, 0)

    def resume(self, last_seq: int, fingerprint: int = 0, published_at: float = 0.0, missing: int = 0) -> None:
        """Go on behind what was published before, so that what passed meanwhile shows as a gap or a restart."""
        self.begin()
        if last_seq >= 0:
            self.last_seq = self.highest = last_seq
            self.history.add(last_seq, fingerprint, published_at)
            self.unverified = True
        if missing:
            self.miss(missing, counted=False)

    def renew(self) -> list[Verdict]:
        """Begin afresh in the lifetime's generation (a new registration, or another ingest's finding)."""
        dropped = self.end_life()
        self.generation = self.lifetime.generation
        self.new_life = False
        if self.connected:
            self.ask()
        return dropped

    def live(self, message: Incoming, *, room: bool = True) -> list[Verdict]:
        """Judge a live message. room: whether what goes on can be kept until it is sent."""
        self._follow_primary()
        if not room:
            return self.starve(message)
        self.starved = False
        last = self.last_seq
        if last is not None and message.seq <= last:
            return backward(self, message)
        if self.highest is None or message.seq > self.highest:
            self.highest = message.seq
        if self.repairing:
            return self.wait(message)
        if message.seq == last + 1 if last is not None else message.seq in self.first_numbers:
            if message.body is None and self.repairable:
                self.ask()
                return self.wait(message)
            return self.take(message)
        if last is not None:
            self.gaps += 1
        if self.repairable:
            self.ask()
            return self.wait(message)
        return self.skip_to(message)

    def set_connected(self, connected: bool) -> list[Verdict]:
        """What the socket's monitor saw; a publisher that was never connected is not lost but unknown."""
        dropped: list[Verdict] = []
        if connected and not self.connected:
            self.lost_connection = False
            self.unverified = self.last_seq is not None
            self.confirm = True
            if self.repairable:
                # What waits may be a dead process's; if it is not, the replay brings it again.
                dropped = [Verdict(message, Arrival.OLD_LIFE) for message in self.held.drop_all()]
                self.highest = self.last_seq
                self.ask()
        elif not connected and self.connected:
            self.lost_connection = True
            self.round = None
        self.connected = connected
        return dropped

    def refused(self, why: str) -> None:
        """An event that mattered could not be used: from now on something is missing."""
        self.why = self.why or why

    def lost(self, why: str = "lost on the way") -> None:
        """Something of this life was lost on our side."""
        self.why = self.why or why
        self.gaps += 1

    def made_whole(self) -> None:
        """What the publisher holds is known exactly again (it said that it emptied everything)."""
        self.missed = self.missed_before_join = 0
        self.why = ""
        self.retry_whole = False

    @property
    def incomplete(self) -> bool:
        """Whether something of this life is missing for good."""
        return bool(self.missed or self.why)

    @property
    def state(self) -> StreamState:
        """The state word (services.ingest.stream_words)."""
        return state_of(self)

    @property
    def reason(self) -> str:
        """Why the stream is not live, in a few words; empty when it is."""
        return reason_of(self)

    @property
    def coverage(self) -> float:
        """Part of the numbers of this life that were taken, 0 to 1."""
        return coverage_of(self)

    def take(self, message: Incoming, arrival: Arrival = Arrival.NEXT) -> list[Verdict]:
        """Take a message as the next one, and what waited for it."""
        verdicts = []
        following: Incoming | None = message
        while following is not None:
            verdicts.append(Verdict(following, self._accept(following, arrival)))
            if copy := self.held.take(following.seq):
                verdicts.append(Verdict(copy, Arrival.DUPLICATE))
            arrival = Arrival.NEXT
            following = self.held.take(following.seq + 1)
        return verdicts

    def skip_to(self, message: Incoming) -> list[Verdict]:
        """Take a message although numbers before it are missing."""
        missing = message.seq - (self.last_seq + 1 if self.last_seq is not None else 0)
        if self.last_seq is None:
            if message.seq in self.first_numbers:
                return self.take(message)
            self.missed_before_join = missing
            self.gaps += 1
        self.miss(missing)
        return self.take(message, Arrival.GAP)

    def wait(self, message: Incoming) -> list[Verdict]:
        """Let a message wait for what comes before it. One that cannot be read is left to the replay."""
        if message.body is None:
            return [Verdict(message, Arrival.UNREADABLE)]
        return [] if self.held.add(message) else [Verdict(message, Arrival.WAITING_FULL)]

    def starve(self, message: Incoming) -> list[Verdict]:
        """Turn a message away because nothing can be sent on; a replay brings it again."""
        self.starved = True
        self.highest = max(message.seq, self.highest if self.highest is not None else -1)
        return [Verdict(message, Arrival.BUFFER_FULL)]

    def room_again(self) -> None:
        """What goes on can be kept again: ask for what was turned away, or show it as a gap with the next message."""
        if self.repairable:
            self.starved = False
            self.ask()

    def miss(self, count: int, *, counted: bool = True) -> None:
        """Numbers of this life will not come."""
        self.missed += count
        if counted:
            self.missed_total += count

    def end_life(self) -> list[Verdict]:
        """The publisher began anew: whatever waits belongs to nobody, the next message taken begins a generation."""
        dropped = [Verdict(message, Arrival.OLD_LIFE) for message in self.held.drop_all()]
        self.begin()
        self.round = None
        self.new_life = True
        return dropped

    def announce(self, now: float) -> None:
        """Begin the new life before its first message: nothing was sent in it yet. now: seconds since the epoch."""
        self._begin_generation(0.0, now)
        self.heard = True

    def ask(self) -> None:
        """Let what is newer wait, and a replay begin as soon as possible."""
        self.repairing = True
        self.attempts = 0
        self.attempt_at = 0.0

    def _accept(self, message: Incoming, arrival: Arrival) -> Arrival:
        if self.new_life:
            self._begin_generation(message.published_at, message.received_at)
            arrival = Arrival.RESTART
        if self.first_seq is None:
            self.first_seq = message.seq
        self.last_seq = message.seq
        self.highest = max(message.seq, self.highest if self.highest is not None else -1)
        self.history.add(message.seq, message.fingerprint, message.published_at)
        self.heard = True
        self.unverified = self.unverified and self.repairing
        self.repaired += message.replayed
        if message.body is None:
            self.miss(1)
        return arrival

    def _begin_generation(self, published_at: float, now: float) -> None:
        """The new generation is the first message's own time (replicas of ingest agree on it), or ``now`` when the
        publisher's clock cannot be right; always above the one before, and not in the future, so that an
        unregistration retires it."""
        self.new_life = False
        self.restarts += 1
        if self.primary:
            published_ms, now_ms = int(published_at * 1000), int(now * 1000)
            began = min(published_ms, now_ms) if abs(published_ms - now_ms) <= MAX_CLOCK_SKEW_MS else now_ms
            self.lifetime.generation = self.generation = max(self.generation + 1, began)

    def _follow_primary(self) -> None:
        if self.generation != self.lifetime.generation:
            self.generation = self.lifetime.generation
            if self.first_seq is not None:
                self.lost("its instance began anew")
