"""What a message's number means, for a publisher that cannot repeat anything."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.streams import StreamState
from services.ingest.arrivals import Arrival, Incoming, Lifetime
from services.ingest.backward import LATE_MESSAGES_OF_A_NEW_LIFE
from services.ingest.stream import Stream

NOW = 1_800_000_000.0
REGISTERED = int(NOW * 1000) - 60_000


def new_stream(*, primary: bool = True) -> Stream:
    return Stream(Lifetime(REGISTERED), primary=primary)


def message(seq: int, life: int = 0, **fields: object) -> Incoming:
    """A message whose payload depends on its number and the life it belongs to; times rise within and over lives."""
    published_at = NOW - 50_000 + life * 1000 + seq
    values: dict[str, object] = {"published_at": published_at, "received_at": NOW, "body": "events"} | fields
    return Incoming(seq, 1 + life * 10_000 + seq, **values)  # type: ignore[arg-type]


def feed(stream: Stream, *numbers: int, life: int = 0, **fields: object) -> list[Arrival]:
    verdicts = [verdict for number in numbers for verdict in stream.live(message(number, life, **fields))]
    return [verdict.arrival for verdict in verdicts]


def test_nothing_heard_is_unknown() -> None:
    assert (new_stream().state, new_stream().coverage) == (StreamState.UNKNOWN, 0.0)


def test_consecutive_numbers_are_live() -> None:
    stream = new_stream()
    assert feed(stream, 0, 1, 2) == [Arrival.NEXT] * 3
    assert (stream.state, stream.reason, stream.coverage) == (StreamState.LIVE, "", 1.0)
    assert (stream.first_seq, stream.last_seq, stream.gaps) == (0, 2, 0)


def test_a_publisher_that_counts_from_one_has_no_gap() -> None:
    stream = new_stream()
    assert feed(stream, 1, 2) == [Arrival.NEXT, Arrival.NEXT]
    assert stream.state is StreamState.LIVE


def test_sq_01_and_t05_a_hole_in_the_numbers_is_counted_and_marks_the_stream() -> None:
    stream = new_stream()
    assert feed(stream, 0, 5) == [Arrival.NEXT, Arrival.GAP]
    assert (stream.state, stream.reason) == (StreamState.GAPPED, "4 messages missing")
    assert (stream.gaps, stream.missed, stream.missed_before_join) == (1, 4, 0)
    assert feed(stream, 6) == [Arrival.NEXT]
    assert stream.state is StreamState.GAPPED, "what is missing stays missing"
    assert stream.coverage == 3 / 7


def test_t11_a_late_join_is_a_gap_of_its_own_kind() -> None:
    stream = new_stream()
    assert feed(stream, 40) == [Arrival.GAP]
    assert (stream.missed, stream.missed_before_join, stream.state) == (40, 40, StreamState.GAPPED)
    assert stream.coverage == 1 / 41


def test_the_same_message_again_is_a_duplicate() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 2)
    assert feed(stream, 1, 2) == [Arrival.DUPLICATE, Arrival.DUPLICATE]
    assert stream.last_seq == 2


def test_a_message_that_comes_after_newer_ones_changes_nothing() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 3)
    assert feed(stream, 2) == [Arrival.LATE]
    assert (stream.last_seq, stream.restarts, stream.state) == (3, 0, StreamState.GAPPED)


def test_duplicates_older_than_what_is_remembered_are_late_and_no_restart() -> None:
    stream = new_stream()
    feed(stream, *range(1000))
    assert set(feed(stream, *range(3))) == {Arrival.LATE}
    assert stream.restarts == 0


def test_sq_02_and_t01_a_number_that_goes_back_with_another_payload_is_a_restart() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 2)
    assert feed(stream, 0, life=1) == [Arrival.RESTART]
    assert stream.generation > REGISTERED
    assert (stream.first_seq, stream.last_seq, stream.restarts) == (0, 0, 1)
    assert stream.state is StreamState.LIVE


def test_a_restart_after_a_single_message_is_seen_although_the_number_is_equal() -> None:
    stream = new_stream()
    feed(stream, 0)
    assert feed(stream, 0, life=1) == [Arrival.RESTART]


def test_a_restart_is_seen_although_the_publisher_sends_no_times() -> None:
    stream = new_stream()
    feed(stream, 0, 1, published_at=0.0)
    assert feed(stream, 0, life=1, published_at=0.0) == [Arrival.RESTART]


def test_a_restart_with_a_clock_that_went_back_is_seen_after_a_few_messages() -> None:
    stream = new_stream()
    feed(stream, *range(100), life=5)
    arrivals = feed(stream, *range(LATE_MESSAGES_OF_A_NEW_LIFE), life=1)
    assert arrivals[:-1] == [Arrival.LATE] * (LATE_MESSAGES_OF_A_NEW_LIFE - 1)
    assert arrivals[-1] is Arrival.RESTART
    assert stream.state is StreamState.GAPPED


def test_a_restart_ends_a_gap() -> None:
    stream = new_stream()
    feed(stream, 0, 9)
    assert feed(stream, 0, life=1) == [Arrival.RESTART]
    assert stream.state is StreamState.LIVE
    assert stream.gaps == 1, "the count since start stays"


def test_a_restart_whose_first_messages_were_missed_begins_gapped() -> None:
    stream = new_stream()
    feed(stream, *range(100))
    assert feed(stream, 30, life=1) == [Arrival.RESTART]
    assert stream.state is StreamState.GAPPED
    assert stream.missed_before_join == 30


def test_t02_numbers_that_begin_anew_before_a_warm_cache_are_no_restart() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 2)
    assert feed(stream, 0, life=1, warm=True) == [Arrival.COUNTER_RESET]
    assert (stream.generation, stream.restarts, stream.counter_resets) == (REGISTERED, 0, 1)
    assert stream.state is StreamState.GAPPED, "what passed while the relay was away is unknown"
    assert feed(stream, 1, life=1) == [Arrival.NEXT]


def test_generations_rise_strictly_even_when_clocks_stand_still() -> None:
    stream = Stream(Lifetime(int(NOW * 1000)))
    feed(stream, 0)
    for life in (1, 2, 3):
        assert feed(stream, 0, life=life, published_at=0.0) == [Arrival.RESTART]
        assert stream.generation == int(NOW * 1000) + life


def test_a_publisher_whose_clock_is_years_off_does_not_set_the_generation() -> None:
    for published_at in (0.0, NOW + 10 * 365 * 86_400):
        stream = new_stream()
        feed(stream, 0)
        feed(stream, 0, life=1, published_at=published_at)
        assert stream.generation == int(NOW * 1000)


def test_a_generation_is_never_in_the_future() -> None:
    stream = new_stream()
    feed(stream, 0)
    feed(stream, 0, life=1, published_at=NOW + 2.0)
    assert stream.generation == int(NOW * 1000)


def test_two_replicas_choose_the_same_generation_for_the_same_restart() -> None:
    replicas = [new_stream(), new_stream()]
    for delay, stream in enumerate(replicas):
        feed(stream, 0, 1)
        feed(stream, 0, life=1, published_at=NOW - 1.5, received_at=NOW + delay)
    assert replicas[0].generation == replicas[1].generation == int((NOW - 1.5) * 1000)


def test_a_resumed_stream_notices_what_passed_while_nobody_listened() -> None:
    def resumed() -> Stream:
        stream = new_stream()
        stream.resume(10, message(10).fingerprint, message(10).published_at)
        return stream

    stream = resumed()
    assert stream.state is StreamState.UNKNOWN
    assert feed(stream, 11) == [Arrival.NEXT]
    assert stream.state is StreamState.LIVE
    late = resumed()
    assert feed(late, 15) == [Arrival.GAP]
    assert (late.missed, late.missed_before_join) == (4, 0)
    assert feed(resumed(), 0, life=1) == [Arrival.RESTART]
    assert feed(resumed(), 10) == [Arrival.DUPLICATE]


def test_t04_a_new_registration_starts_with_a_fresh_cursor() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 9)
    stream.lifetime.generation += 5
    stream.renew()
    assert (stream.last_seq, stream.state, stream.generation) == (None, StreamState.UNKNOWN, REGISTERED + 5)
    assert feed(stream, 0) == [Arrival.NEXT]
    assert stream.generation == REGISTERED + 5


def test_a_lost_connection_is_stale_and_a_publisher_never_connected_is_unknown() -> None:
    stream = new_stream()
    assert stream.state is StreamState.UNKNOWN
    stream.set_connected(False)
    assert stream.state is StreamState.UNKNOWN
    stream.set_connected(True)
    feed(stream, 0)
    assert stream.state is StreamState.LIVE
    stream.set_connected(False)
    assert (stream.state, stream.reason) == (StreamState.STALE, "connection lost")
    stream.set_connected(True)
    assert stream.state is StreamState.UNKNOWN, "nothing proves yet that it is the same process"
    feed(stream, 1)
    assert stream.state is StreamState.LIVE


def test_po_09_silence_is_not_death() -> None:
    stream = new_stream()
    stream.set_connected(True)
    feed(stream, 0)
    assert stream.state is StreamState.LIVE, "no clock is asked: only the connection and the numbers count"


def test_a_full_buffer_makes_a_gap_that_shows_at_once() -> None:
    stream = new_stream()
    feed(stream, 0)
    (verdict,) = stream.live(message(1), room=False)
    assert verdict.arrival is Arrival.BUFFER_FULL
    assert (stream.state, stream.coverage) == (StreamState.GAPPED, 1 / 2)
    assert feed(stream, 2) == [Arrival.GAP]
    assert stream.missed == 1


def test_t10_a_message_that_cannot_be_read_is_missing_and_costs_nothing_else() -> None:
    stream = new_stream()
    assert feed(stream, 0) == feed(stream, 1, body=None) == feed(stream, 2) == [Arrival.NEXT]
    assert (stream.missed, stream.state, stream.restarts) == (1, StreamState.GAPPED, 0)


def test_t18_emptying_everything_makes_a_stream_whole_again() -> None:
    stream = new_stream()
    feed(stream, 0, 7)
    stream.made_whole()
    assert (stream.state, stream.coverage) == (StreamState.LIVE, 1.0)


def test_a_further_socket_restarts_without_a_new_generation() -> None:
    lifetime = Lifetime(REGISTERED)
    stream = Stream(lifetime, primary=False)
    feed(stream, 0, 1)
    assert feed(stream, 0, life=1) == [Arrival.RESTART]
    assert lifetime.generation == stream.generation == REGISTERED


def test_a_further_socket_is_gapped_when_the_primary_began_a_new_life() -> None:
    lifetime = Lifetime(REGISTERED)
    primary, further = Stream(lifetime), Stream(lifetime, primary=False)
    feed(primary, 0)
    feed(further, 0)
    feed(primary, 0, life=1)
    assert feed(further, 1) == [Arrival.NEXT]
    assert further.generation == primary.generation
    assert further.state is StreamState.GAPPED


@given(st.lists(st.integers(0, 12), max_size=60))
def test_every_sequence_keeps_the_invariants(numbers: list[int]) -> None:
    stream = new_stream()
    taken = 0
    for position, number in enumerate(numbers):
        before = stream.generation
        (arrival,) = feed(stream, number, life=position)
        if arrival is Arrival.RESTART:
            assert stream.generation > before
            taken = 0
        else:
            assert arrival in (Arrival.NEXT, Arrival.GAP), "no payload came twice, and times rise"
            assert stream.generation == before
        taken += 1
        assert stream.last_seq == number
        start = 0 if stream.missed_before_join or stream.first_seq == 0 else stream.first_seq
        assert stream.last_seq - (start or 0) + 1 == taken + stream.missed
        assert (stream.state is StreamState.GAPPED) == (stream.missed > 0)
        assert 0 < stream.coverage <= 1
