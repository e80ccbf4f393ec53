"""What a message's number means."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.streams import StreamState
from services.ingest.stream import Arrival, Lifetime, Stream

NOW = 1_800_000_000.0
REGISTERED = int(NOW * 1000) - 60_000


def new_stream(*, primary: bool = True) -> Stream:
    return Stream(Lifetime(REGISTERED), primary=primary)


def feed(stream: Stream, *numbers: int) -> list[Arrival]:
    return [stream.observe(number, fingerprint=1000 + number) for number in numbers]


def test_nothing_heard_is_unknown() -> None:
    assert new_stream().state is StreamState.UNKNOWN


def test_consecutive_numbers_are_live() -> None:
    stream = new_stream()
    assert feed(stream, 0, 1, 2) == [Arrival.NEXT] * 3
    assert stream.state is StreamState.LIVE
    assert (stream.first_seq, stream.last_seq, stream.gaps) == (0, 2, 0)


def test_a_publisher_that_counts_from_one_has_no_gap() -> None:
    stream = new_stream()
    assert feed(stream, 1, 2) == [Arrival.NEXT, Arrival.NEXT]
    assert stream.state is StreamState.LIVE


def test_sq_01_a_hole_in_the_numbers_is_counted_and_marks_the_stream() -> None:
    stream = new_stream()
    assert feed(stream, 0, 5) == [Arrival.NEXT, Arrival.GAP]
    assert stream.state is StreamState.GAPPED
    assert (stream.gaps, stream.missed, stream.missed_before_join) == (1, 4, 0)
    assert feed(stream, 6) == [Arrival.NEXT]
    assert stream.state is StreamState.GAPPED, "what is missing stays missing until it is repaired"


def test_t11_a_late_join_is_a_gap_of_its_own_kind() -> None:
    stream = new_stream()
    assert feed(stream, 40) == [Arrival.GAP]
    assert (stream.missed, stream.missed_before_join, stream.state) == (40, 40, StreamState.GAPPED)


def test_the_same_message_again_is_a_duplicate() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 2)
    assert feed(stream, 1, 2) == [Arrival.DUPLICATE, Arrival.DUPLICATE]
    assert stream.last_seq == 2


def test_sq_02_a_number_that_goes_back_with_another_payload_is_a_restart() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 2)
    assert stream.observe(0, fingerprint=7) is Arrival.RESTART
    assert stream.last_seq == 2, "not taken before the caller settled the new life"
    assert stream.restart(0, 7, NOW, NOW) is Arrival.NEXT
    assert stream.generation == int(NOW * 1000)
    assert (stream.first_seq, stream.last_seq, stream.restarts) == (0, 0, 1)
    assert stream.state is StreamState.LIVE


def test_a_restart_after_a_single_message_is_seen_although_the_number_is_equal() -> None:
    stream = new_stream()
    feed(stream, 0)
    assert stream.observe(0, fingerprint=7) is Arrival.RESTART


def test_a_restart_ends_a_gap() -> None:
    stream = new_stream()
    feed(stream, 0, 9)
    assert stream.observe(0, 7) is Arrival.RESTART
    stream.restart(0, 7, NOW, NOW)
    assert stream.state is StreamState.LIVE
    assert stream.gaps == 1, "the count since start stays"


def test_a_restart_whose_first_messages_were_missed_begins_gapped() -> None:
    stream = new_stream()
    feed(stream, *range(100))
    assert stream.observe(30, 7) is Arrival.RESTART
    assert stream.restart(30, 7, NOW, NOW) is Arrival.GAP
    assert stream.state is StreamState.GAPPED
    assert stream.missed_before_join == 30


def test_generations_rise_strictly_even_when_clocks_stand_still() -> None:
    stream = Stream(Lifetime(int(NOW * 1000)))
    feed(stream, 0)
    for expected in (1, 2, 3):
        assert stream.observe(0, expected) is Arrival.RESTART
        stream.restart(0, expected, NOW, NOW)
        assert stream.generation == int(NOW * 1000) + expected


def test_a_publisher_whose_clock_is_years_off_does_not_set_the_generation() -> None:
    for published_at in (0.0, 1000.0, NOW + 10 * 365 * 86_400):
        stream = new_stream()
        feed(stream, 0)
        stream.observe(0, 7)
        stream.restart(0, 7, published_at, NOW)
        assert stream.generation == int(NOW * 1000)


def test_a_generation_is_never_in_the_future() -> None:
    stream = new_stream()
    feed(stream, 0)
    stream.observe(0, 7)
    stream.restart(0, 7, NOW + 2.0, NOW)
    assert stream.generation == int(NOW * 1000)


def test_two_replicas_choose_the_same_generation_for_the_same_restart() -> None:
    replicas = [new_stream(), new_stream()]
    for delay, stream in enumerate(replicas):
        feed(stream, 0, 1)
        stream.observe(0, 7)
        stream.restart(0, 7, published_at=NOW, now=NOW + delay)
    assert replicas[0].generation == replicas[1].generation


def test_a_resumed_stream_notices_what_passed_while_nobody_listened() -> None:
    stream = new_stream()
    stream.resume(last_seq=10)
    assert stream.state is StreamState.UNKNOWN
    assert feed(stream, 11) == [Arrival.NEXT]
    late = new_stream()
    late.resume(last_seq=10)
    assert feed(late, 15) == [Arrival.GAP]
    assert (late.missed, late.missed_before_join) == (4, 0)
    restarted = new_stream()
    restarted.resume(last_seq=10)
    assert feed(restarted, 0) == [Arrival.RESTART]


def test_t04_a_new_registration_starts_with_a_fresh_cursor() -> None:
    stream = new_stream()
    feed(stream, 0, 1, 9)
    stream.lifetime.generation += 5
    stream.renew()
    assert (stream.last_seq, stream.state, stream.generation) == (None, StreamState.UNKNOWN, REGISTERED + 5)
    assert feed(stream, 0) == [Arrival.NEXT]


def test_a_lost_connection_is_stale_and_a_publisher_never_connected_is_unknown() -> None:
    stream = new_stream()
    words = []
    for connected in (False, True, False, False, True):
        stream.set_connected(connected)
        words.append(stream.state)
        if connected and stream.last_seq is None:
            feed(stream, 0)
            words.append(stream.state)
    unknown, live, stale = StreamState.UNKNOWN, StreamState.LIVE, StreamState.STALE
    assert words == [unknown, unknown, live, stale, stale, live]


def test_a_further_socket_restarts_without_a_new_generation() -> None:
    lifetime = Lifetime(REGISTERED)
    stream = Stream(lifetime, primary=False)
    feed(stream, 0, 1)
    assert stream.observe(0, 7) is Arrival.RESTART
    stream.restart(0, 7, NOW, NOW)
    assert lifetime.generation == stream.generation == REGISTERED


def test_a_further_socket_is_gapped_when_the_primary_began_a_new_life() -> None:
    lifetime = Lifetime(REGISTERED)
    primary, further = Stream(lifetime), Stream(lifetime, primary=False)
    feed(primary, 0)
    feed(further, 0)
    primary.observe(0, 7)
    primary.restart(0, 7, NOW, NOW)
    assert feed(further, 1) == [Arrival.NEXT]
    assert further.generation == primary.generation
    assert further.state is StreamState.GAPPED


@given(st.lists(st.integers(0, 12), max_size=60))
def test_every_sequence_keeps_the_invariants(numbers: list[int]) -> None:
    stream = new_stream()
    taken = 0
    for position, number in enumerate(numbers):
        before = stream.generation
        arrival = stream.observe(number, position)
        if arrival is Arrival.RESTART:
            stream.restart(number, position, NOW, NOW)
            assert stream.generation > before
            taken = 0
        else:
            assert arrival is not Arrival.DUPLICATE, "no payload came twice"
            assert stream.generation == before
        taken += 1
        assert stream.last_seq == number
        start = 0 if stream.missed_before_join or stream.first_seq == 0 else stream.first_seq
        assert stream.last_seq - (start or 0) + 1 == taken + stream.missed
        assert (stream.state is StreamState.GAPPED) == (stream.missed > 0)
