"""Repair by replay: after any loss what was taken is the publisher's own, in order and once, or the stream says so."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.streams import StreamState
from services.ingest.arrivals import GOES_ON, Arrival, Incoming, Lifetime, Verdict
from services.ingest.holding import HoldLimits
from services.ingest.repair import RepairPolicy, begin_round, due, replayed, resync, round_ended
from services.ingest.stream import Stream

NOW = 1_800_000_000.0
POLICY = RepairPolicy()


@dataclass
class Process:
    """A publisher process: its numbers begin at 0, its buffer keeps the newest messages."""

    life: int
    clock: list[float]
    buffer_steps: int = 10_000
    sent: list[Incoming] = field(default_factory=list)

    def publish(self) -> Incoming:
        self.clock[0] += 0.001
        seq = len(self.sent)
        message = Incoming(seq, 1 + self.life * 1_000_000 + seq, self.clock[0], body=(self.life, seq))
        self.sent.append(message)
        return message

    def replay(self, start: int) -> list[Incoming]:
        kept = self.sent[-self.buffer_steps :] if self.buffer_steps else []
        return [self.copy(message) for message in kept if message.seq >= start]

    @staticmethod
    def copy(message: Incoming) -> Incoming:
        return Incoming(message.seq, message.fingerprint, message.published_at, body=message.body, replayed=True)


class Follower:
    """A stream with the adapter's part played by hand; ``taken`` is what went on, anew with each life."""

    def __init__(self, limits: HoldLimits | None = None) -> None:
        self.now = NOW
        self.clock = [NOW - 1000]
        self.stream = Stream(Lifetime(int((NOW - 5000) * 1000)), repairable=True, limits=limits)
        self.process = Process(0, self.clock)
        self.taken: list[object] = []
        self.arrivals: list[Arrival] = []
        self.rounds: list[int] = []
        self.generation = self.stream.generation

    def restart(self, *, published: int = 0, connection_breaks: bool = True) -> None:
        if connection_breaks:
            self.stream.set_connected(False)
        self.process = Process(self.process.life + 1, self.clock, self.process.buffer_steps)
        for _ in range(published):
            self.process.publish()
        if connection_breaks:
            self.conclude(self.stream.set_connected(True))

    def publish(self, *, lost: bool = False) -> None:
        message = self.process.publish()
        if not lost:
            self.conclude(self.stream.live(message))

    def conclude(self, verdicts: list[Verdict]) -> None:
        if self.stream.generation != self.generation:
            self.generation = self.stream.generation
            self.taken.clear()
        for verdict in verdicts:
            self.arrivals.append(verdict.arrival)
            if verdict.arrival in GOES_ON and verdict.message.body is not None:
                self.taken.append(verdict.message.body)

    def wants_replay(self) -> bool:
        return due(self.stream, self.now, self.clock[0], POLICY)

    def round(self, *, lose: frozenset[int] = frozenset(), cut: int | None = None, end: bool = True) -> None:
        """One replay. lose: positions in the answer that get lost; cut: nothing, not even the end, after so many."""
        start = begin_round(self.stream)
        self.rounds.append(start)
        answer = self.process.replay(start)[:cut]
        for position, message in enumerate(answer):
            if position not in lose:
                self.conclude(replayed(self.stream, message))
                if self.stream.round is None:
                    return
        self.conclude(round_ended(self.stream, end and cut is None, self.now, POLICY))

    def settle(self, **faults: object) -> None:
        """Replay until none is due."""
        for _ in range(200):
            self.now = max(self.now, self.stream.attempt_at if self.stream.repairing else self.now)
            if not self.wants_replay():
                return
            self.round(**faults)  # type: ignore[arg-type]
        raise AssertionError("replays never come to an end")

    @property
    def whole(self) -> list[object]:
        return [message.body for message in self.process.sent]

    def quiet(self) -> None:
        """Time passes until an idle publisher is looked at."""
        self.now = max(self.now, self.stream.verify_at, self.clock[0] + POLICY.verify) + 0.001


def follower(messages: int = 0, **options: object) -> Follower:
    """A follower that has heard so many messages and is at rest."""
    subject = Follower(**options)  # type: ignore[arg-type]
    subject.stream.set_connected(True)
    subject.settle()
    for _ in range(messages):
        subject.publish()
    return subject


def test_a_publisher_that_has_sent_nothing_is_live_as_soon_as_it_says_so() -> None:
    subject = follower()
    assert (subject.stream.state, subject.stream.coverage) == (StreamState.LIVE, 1.0)


def test_t11_a_late_joiner_asks_for_everything_before_it_applies_anything() -> None:
    subject = Follower()
    for _ in range(40):
        subject.process.publish()
    subject.stream.set_connected(True)
    subject.publish()
    assert subject.taken == []
    assert (subject.stream.state, subject.stream.coverage) == (StreamState.RECOVERING, 0.0)
    subject.settle()
    assert subject.rounds == [0]
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_t11_a_late_joiner_gets_what_the_buffer_still_has_and_says_what_it_lacks() -> None:
    subject = Follower()
    subject.process.buffer_steps = 10
    for _ in range(40):
        subject.process.publish()
    subject.stream.set_connected(True)
    subject.settle()
    assert subject.taken == subject.whole[30:]
    assert (subject.stream.state, subject.stream.coverage) == (StreamState.GAPPED, 0.25)
    assert subject.stream.missed_before_join == 30


def test_sq_01_and_t05_a_gap_is_repaired_before_anything_newer_is_applied() -> None:
    subject = follower(5)
    subject.publish(lost=True)
    subject.publish()
    assert subject.stream.state is StreamState.RECOVERING
    assert len(subject.taken) == 5
    subject.publish()
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)
    assert (subject.stream.gaps, subject.stream.repaired, subject.stream.missed) == (1, 1, 0)


def test_sq_03_and_t06_live_waits_for_the_replay_and_a_late_replay_changes_nothing() -> None:
    subject = follower(2)
    subject.publish(lost=True)
    subject.publish()
    for _ in range(POLICY.attempts):
        subject.now = subject.stream.attempt_at + 1
        begin_round(subject.stream)
        subject.conclude(round_ended(subject.stream, False, subject.now, POLICY))
    assert subject.stream.state is StreamState.GAPPED
    assert subject.taken == [(0, 0), (0, 1), (0, 3)]
    begin_round(subject.stream)
    subject.stream.round.whole = False  # type: ignore[union-attr]
    for message in subject.process.replay(1):
        subject.conclude(replayed(subject.stream, message))
    assert subject.taken == [(0, 0), (0, 1), (0, 3)], "2 is older than what was applied"


def test_an_unreachable_replay_is_asked_again_later_and_then_everything_is_made_good() -> None:
    subject = follower(2)
    subject.publish(lost=True)
    subject.publish()
    for _ in range(POLICY.attempts):
        subject.now = subject.stream.attempt_at + 1
        begin_round(subject.stream)
        subject.conclude(round_ended(subject.stream, False, subject.now, POLICY))
    assert subject.stream.state is StreamState.GAPPED
    subject.quiet()
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_t08_a_replay_that_is_cut_without_an_end_is_asked_for_again_as_long_as_it_brings_anything() -> None:
    subject = follower(1)
    for _ in range(20):
        subject.publish(lost=True)
    subject.publish()
    subject.settle(cut=5)
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)
    assert len(subject.rounds) > 4


def test_t08_a_replay_that_never_marks_its_end_still_ends() -> None:
    subject = follower(1)
    subject.publish(lost=True)
    subject.publish()
    subject.settle(end=False)
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_a_replay_that_loses_messages_in_its_middle_is_asked_for_again_from_the_first_hole() -> None:
    subject = Follower()
    for _ in range(3000):
        subject.process.publish()
    subject.stream.set_connected(True)
    chance = random.Random(5)
    for _ in range(60):
        if not subject.wants_replay():
            break
        subject.round(lose=frozenset(n for n in range(1, 3000) if chance.random() < 0.02))
        subject.now = max(subject.now, subject.stream.attempt_at)
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_a_number_that_the_publisher_itself_lost_is_given_up_and_the_rest_goes_on() -> None:
    subject = follower(3)
    gone = subject.process.publish()
    subject.process.sent[3] = Incoming(10**9, 0)  # consumed, but in no buffer
    for _ in range(2):
        subject.publish()
    kept = [message for message in subject.process.sent if message.seq < 10**9]
    subject.process.replay = lambda start: [  # type: ignore[method-assign]
        Process.copy(message) for message in kept if message.seq >= start
    ]
    subject.settle()
    assert gone.seq == 3
    assert subject.taken == [message.body for message in kept]
    assert (subject.stream.state, subject.stream.missed) == (StreamState.GAPPED, 1)


def test_sq_02_a_restart_is_seen_at_once_although_the_new_process_says_nothing() -> None:
    subject = follower(5)
    before = subject.stream.generation
    subject.restart()
    subject.settle()
    assert subject.stream.generation > before
    assert (subject.taken, subject.stream.state, subject.stream.coverage) == ([], StreamState.LIVE, 1.0)


@pytest.mark.parametrize("published", [1, 4, 5, 6, 50])
def test_t03_and_sq_02_a_restart_that_ran_past_the_old_number_is_told_by_its_history(published: int) -> None:
    subject = follower(5)
    subject.restart(published=published)
    subject.publish()
    subject.settle()
    assert subject.stream.restarts == 1
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_t03_a_restart_beyond_what_the_buffer_shows_is_not_taken_for_the_same_life() -> None:
    subject = follower(5)
    subject.process.buffer_steps = 10
    subject.restart(published=40)
    subject.settle()
    assert subject.taken == subject.whole[30:]
    assert (subject.stream.restarts, subject.stream.state) == (1, StreamState.GAPPED)


def test_a_connection_that_only_blinked_keeps_the_life_and_brings_what_was_missed() -> None:
    subject = follower(5)
    subject.stream.set_connected(False)
    subject.publish(lost=True)
    subject.stream.set_connected(True)
    assert subject.stream.state is StreamState.RECOVERING
    subject.settle()
    assert (subject.stream.restarts, subject.taken, subject.stream.state) == (0, subject.whole, StreamState.LIVE)


def test_what_passed_while_ingest_was_down_is_asked_for_and_a_restart_meanwhile_is_noticed() -> None:
    for published, restarted in ((5, False), (5, True), (20, True), (0, True)):
        subject = Follower()
        for _ in range(10):
            subject.process.publish()
        last = subject.process.sent[-1]
        subject.stream.resume(last.seq, last.fingerprint, last.published_at)
        if restarted:
            subject.process = Process(1, subject.clock)
        for _ in range(published):
            subject.process.publish()
        subject.stream.set_connected(True)
        subject.settle()
        assert subject.stream.restarts == restarted
        assert subject.taken == (subject.whole if restarted else subject.whole[10:])
        assert subject.stream.state is StreamState.LIVE


def test_a_last_message_that_was_lost_before_a_silence_is_found_by_a_look_at_the_quiet_publisher() -> None:
    subject = follower(3)
    subject.publish(lost=True)
    assert subject.stream.state is StreamState.LIVE, "nobody can know yet"
    subject.quiet()
    assert subject.wants_replay()
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_a_look_at_a_quiet_publisher_does_not_hold_up_live_messages() -> None:
    subject = follower(3)
    subject.quiet()
    begin_round(subject.stream)
    subject.publish()
    assert subject.taken == subject.whole
    assert subject.stream.state is StreamState.LIVE


def test_waiting_is_bounded_and_what_found_no_room_comes_with_the_replay() -> None:
    subject = follower(1, limits=HoldLimits(messages=16))
    subject.publish(lost=True)
    for _ in range(100):
        subject.publish()
    assert len(subject.stream.held) == 16
    assert subject.arrivals.count(Arrival.WAITING_FULL) == 84
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_t10_a_message_spoilt_on_its_way_is_had_again_from_the_replay() -> None:
    subject = follower(2)
    spoilt = subject.process.publish()
    (verdict,) = subject.stream.live(Incoming(spoilt.seq, 99, body=None))
    assert verdict.arrival is Arrival.UNREADABLE
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_t10_a_message_that_is_unreadable_in_the_buffer_too_is_missing_and_the_rest_goes_on() -> None:
    subject = follower(2)
    subject.process.publish().body = None
    subject.conclude(subject.stream.live(Incoming(2, subject.process.sent[2].fingerprint, body=None)))
    subject.publish()
    subject.settle()
    assert subject.taken == [(0, 0), (0, 1), (0, 3)]
    assert (subject.stream.missed, subject.stream.state) == (1, StreamState.GAPPED)


def test_na_01_what_found_no_room_while_nats_was_away_is_asked_for_when_there_is_room_again() -> None:
    subject = follower(3)
    for _ in range(5):
        message = subject.process.publish()
        (verdict,) = subject.stream.live(message, room=False)
        assert verdict.arrival is Arrival.BUFFER_FULL
    assert subject.stream.state is StreamState.GAPPED
    assert not subject.wants_replay(), "not while nothing can be sent on"
    subject.stream.room_again()
    subject.settle()
    assert (subject.taken, subject.stream.state, subject.stream.missed) == (subject.whole, StreamState.LIVE, 0)


def test_a_replay_that_finds_no_room_stops_and_goes_on_later() -> None:
    subject = Follower()
    for _ in range(10):
        subject.process.publish()
    subject.stream.set_connected(True)
    begin_round(subject.stream)
    answer = subject.process.replay(0)
    subject.conclude(replayed(subject.stream, answer[0]))
    subject.conclude(replayed(subject.stream, answer[1], room=False))
    assert subject.stream.round is None
    assert subject.stream.state is StreamState.GAPPED
    subject.stream.room_again()
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_a_resync_begins_a_generation_from_all_that_the_publisher_can_still_tell() -> None:
    subject = follower(5)
    before = subject.stream.generation
    subject.conclude(resync(subject.stream))
    subject.settle()
    assert subject.stream.generation > before
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)


def test_t04_a_new_registration_asks_for_everything_again() -> None:
    subject = follower(5)
    subject.stream.lifetime.generation += 1
    subject.conclude(subject.stream.renew())
    subject.settle()
    assert (subject.taken, subject.stream.state) == (subject.whole, StreamState.LIVE)
    assert subject.stream.generation == subject.stream.lifetime.generation


ACTIONS = ("publish", "publish", "publish", "lose", "duplicate", "blink", "restart", "restart_ahead", "round", "swap")


@settings(max_examples=300, deadline=None)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=60),
    buffer_steps=st.sampled_from((3, 20, 10_000)),
    hold=st.sampled_from((2, 1000)),
    chance=st.randoms(use_true_random=False),
)
def test_whatever_happens_the_end_is_the_publishers_history_or_the_stream_says_that_it_is_not(
    actions: list[str], buffer_steps: int, hold: int, chance: random.Random
) -> None:
    subject = Follower(HoldLimits(messages=hold))
    subject.process.buffer_steps = buffer_steps
    subject.stream.set_connected(True)
    for action in actions:
        if action == "publish":
            subject.publish()
        elif action == "lose":
            subject.publish(lost=True)
        elif action == "duplicate" and subject.process.sent:
            subject.conclude(subject.stream.live(chance.choice(subject.process.sent)))
        elif action == "swap":
            first, second = subject.process.publish(), subject.process.publish()
            subject.conclude(subject.stream.live(second))
            subject.conclude(subject.stream.live(first))
        elif action == "blink":
            subject.stream.set_connected(False)
            subject.publish(lost=True)
            subject.conclude(subject.stream.set_connected(True))
        elif action == "restart":
            subject.restart()
        elif action == "restart_ahead":
            subject.restart(published=chance.randrange(1, 30))
        elif action == "round" and subject.wants_replay():
            subject.round(lose=frozenset(n for n in range(1, 40) if chance.random() < 0.2))
    subject.quiet()
    subject.settle()
    subject.quiet()
    subject.settle()
    lives = {life for life, _ in subject.taken}  # type: ignore[misc, attr-defined]
    assert lives <= {subject.process.life}, "nothing of a process that is gone"
    assert subject.taken == sorted(subject.taken), "in the publisher's order"  # type: ignore[type-var]
    assert len(set(subject.taken)) == len(subject.taken), "each once"
    if subject.taken != subject.whole:
        assert subject.stream.state is StreamState.GAPPED
        assert subject.stream.missed == len(subject.whole) - len(subject.taken)
    else:
        assert subject.stream.state in (StreamState.LIVE, StreamState.GAPPED)
        if buffer_steps == 10_000:
            assert subject.stream.state is StreamState.LIVE
    assert subject.stream.held.bytes == 0
    assert len(subject.stream.held) == 0
