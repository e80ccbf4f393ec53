"""Notes of ingest's /readyz about publishers that need a look."""

from types import SimpleNamespace

import pytest

from schemas.registry import EngineRecord
from schemas.wire.types import RejectReason
from services.ingest.batching import BatchBuffer
from services.ingest.complaints import MAX_NOTES, SILENT_SECONDS, Complaints
from services.ingest.counts import Counts
from services.ingest.intake import Intake
from services.ingest.outcomes import MemoryBudget
from services.ingest.registrations import publishers_of
from services.ingest.stream import Lifetime, Stream
from services.ingest.subscriptions import Subscription
from services.runtime.health import Health

NOW = 1000.0


def subscription(dp_rank: int = 0) -> Subscription:
    endpoint = f"tcp://10.0.0.5:{5557 + dp_rank}"
    record = EngineRecord(
        instance_id="a", model="m", block_size=32, dp_rank=dp_rank, generation=1, endpoints={"npu": endpoint}
    )
    (publisher,) = publishers_of(record)
    intake = Intake(publisher, Stream(Lifetime(1)), BatchBuffer(10, 10_000), MemoryBudget(10_000), 10_000, 10_000)
    return Subscription(intake, SimpleNamespace(), ever_connected=True, since=NOW)  # type: ignore[arg-type]


def refuse(counts: Counts, reason: RejectReason, events: int = 1) -> None:
    counts.events.received += events
    counts.events.rejected[reason] += events


def publish(counts: Counts, events: int = 1) -> None:
    counts.events.received += events
    counts.events.published += events


@pytest.fixture
def health() -> Health:
    return Health("ingest")


def test_ev_01_a_publisher_that_is_refused_in_full_has_a_note_until_it_can_be_used(health: Health) -> None:
    publisher, complaints = subscription(), Complaints(health)
    counts = publisher.intake.counts
    publish(counts, 5)
    complaints.look([publisher], NOW)
    assert health.notes == {}
    refuse(counts, RejectReason.WRONG_TYPE, 3)
    for _ in range(2):
        complaints.look([publisher], NOW)
        assert "wrong_type 3" in health.notes["publisher a rank 0 at tcp://10.0.0.5:5557"]
    assert health.ready
    publish(counts)
    complaints.look([publisher], NOW)
    assert health.notes == {}


def test_single_bad_events_among_good_ones_are_counted_without_a_note(health: Health) -> None:
    publisher, complaints = subscription(), Complaints(health)
    refuse(publisher.intake.counts, RejectReason.BAD_HASH)
    publish(publisher.intake.counts)
    complaints.look([publisher], NOW)
    assert health.notes == {}


def test_messages_that_cannot_be_read_at_all_make_a_note(health: Health) -> None:
    publisher = subscription()
    publisher.intake.handle([b"payload alone"], now=NOW)
    Complaints(health).look([publisher], NOW)
    (note,) = health.notes.values()
    assert "frame_count 1" in note


def test_hy_01_events_of_other_cache_groups_are_no_fault(health: Health) -> None:
    publisher = subscription()
    refuse(publisher.intake.counts, RejectReason.NON_MAIN_ATTENTION, 100)
    Complaints(health).look([publisher], NOW)
    assert health.notes == {}


def test_bs_01_a_block_size_that_disagrees_is_told_with_both_sizes(health: Health) -> None:
    publisher = subscription()
    refuse(publisher.intake.counts, RejectReason.BLOCK_SIZE_MISMATCH)
    publisher.intake.counts.block_size_seen = 64
    Complaints(health).look([publisher], NOW)
    assert list(health.notes.values()) == ["block_size 64 in the events, 32 in the registration"]


def test_dp_01_ranks_that_nothing_listens_for_are_named_after_a_while(health: Health) -> None:
    ranks, complaints = [subscription(rank) for rank in range(4)], Complaints(health)
    for rank in ranks[1:]:
        rank.ever_connected = False
    complaints.look(ranks, NOW + SILENT_SECONDS - 1)
    assert health.notes == {}
    complaints.look(ranks, NOW + SILENT_SECONDS + 1)
    assert [name.split(" at ")[0] for name in health.notes] == [f"publisher a rank {rank}" for rank in (1, 2, 3)]
    assert all("never connected in 11 s" in note for note in health.notes.values())
    complaints.look(ranks[:1], NOW + SILENT_SECONDS + 2)
    assert health.notes == {}


def test_notes_are_limited(health: Health) -> None:
    ranks = [subscription(rank) for rank in range(MAX_NOTES + 7)]
    for rank in ranks:
        rank.ever_connected = False
    Complaints(health).look(ranks, NOW + 60)
    assert len(health.notes) == MAX_NOTES + 1
    assert health.notes["publishers"] == "7 more have notes, see /publishers"
