"""A publisher's messages become batches, in order and bounded."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from schemas.blocks import Tier, pack_hashes, unpack_hashes
from schemas.events import Cleared, Event, Removed, Stored, encode
from schemas.registry import EngineRecord, PoolRecord
from services.ingest.batching import BatchBuffer, event_bytes, split_event
from services.ingest.pending import Message
from services.ingest.registrations import publishers_of

ENGINE = publishers_of(
    EngineRecord(
        instance_id="a",
        model="m",
        block_size=4,
        dp_rank=3,
        generation=7,
        endpoints={Tier.NPU: "tcp://h:1"},
        counted=True,
    )
)[0]


def stored(*hashes: int, parent: int | None = None) -> Stored:
    return Stored(Tier.NPU, pack_hashes(hashes), parent, pack_hashes(value + 1000 for value in hashes), block_size=4)


def message(seq: int, *events: Event, generation: int = 7) -> Message:
    return Message(seq, generation, 100.0 + seq, 200.0 + seq, list(events), accepted=len(events), blocks=len(events))


def test_consecutive_messages_become_one_batch_with_their_numbers_and_the_oldest_times() -> None:
    buffer = BatchBuffer(100, 10_000)
    for seq in (5, 6, 7):
        buffer.append(message(seq, stored(seq)))
    assert len(buffer) == 1
    batch = buffer.head()
    assert batch is not None
    body = batch.body(ENGINE)
    assert (body.first_seq, body.last_seq, body.generation) == (5, 7, 7)
    assert (body.published_at, body.received_at) == (105.0, 205.0)
    assert (body.source, body.instance_id, body.dp_rank, body.counted) == ("engine", "a", 3, True)
    assert body.events == [stored(5), stored(6), stored(7)]


def test_a_batch_spans_neither_a_gap_nor_a_generation() -> None:
    buffer = BatchBuffer(100, 10_000)
    buffer.append(message(5, stored(5)))
    buffer.append(message(8, stored(8)))
    buffer.append(message(9, stored(9), generation=8))
    numbers = []
    while batch := buffer.head():
        numbers.append((batch.generation, batch.first_seq, batch.last_seq))
        buffer.confirm()
    assert numbers == [(7, 5, 5), (7, 8, 8), (8, 9, 9)]


def test_the_head_never_changes_once_it_was_taken() -> None:
    buffer = BatchBuffer(100, 10_000)
    buffer.append(message(1, stored(1)))
    head = buffer.head()
    assert head is not None
    sent = encode(head.body(ENGINE))
    buffer.append(message(2, stored(2)))
    again = buffer.head()
    assert again is head
    assert encode(head.body(ENGINE)) == sent
    buffer.confirm()
    following = buffer.head()
    assert following is not None
    assert following.first_seq == 2


def test_batches_are_bounded_in_events_and_bytes() -> None:
    by_events = BatchBuffer(2, 10_000)
    by_bytes = BatchBuffer(100, 1000)
    for seq in range(10):
        by_events.append(message(seq, stored(seq)))
        by_bytes.append(message(seq, stored(*range(10))))
    assert len(by_events) == 5
    assert len(by_bytes) == 5


def test_the_byte_count_returns_to_zero() -> None:
    buffer = BatchBuffer(3, 2000)
    for seq in range(20):
        buffer.append(message(seq, stored(*range(seq * 20)), Removed(Tier.CPU, pack_hashes(range(seq)))))
    assert buffer.bytes > 0
    while buffer.head():
        buffer.confirm()
    assert buffer.bytes == 0
    buffer.append(message(1, stored(1)))
    buffer.drop_all()
    assert buffer.bytes == 0


def test_a_message_above_the_body_limit_goes_in_numbered_parts_and_is_counted_once() -> None:
    buffer = BatchBuffer(100, 1024)
    buffer.append(message(1, stored(1)))
    buffer.append(message(2, stored(*range(500)), Removed(Tier.NPU, pack_hashes(range(300)))))
    buffer.append(message(3, stored(3)))
    batches = []
    while buffer.head():
        batches.append(buffer.confirm())
    parts = [batch.part for batch in batches if batch.first_seq == 2]
    assert len(parts) > 1
    assert parts == list(range(len(parts)))
    assert sum(batch.messages for batch in batches) == 3
    assert all(len(encode(batch.body(ENGINE))) <= 1024 for batch in batches)
    numbers = [(batch.first_seq, batch.last_seq) for batch in batches]
    assert numbers == sorted(numbers)


@given(st.integers(1, 400), st.one_of(st.none(), st.integers(0, 2**64 - 1)), st.booleans(), st.integers(100, 2000))
def test_pieces_of_a_chain_join_to_the_same_chain(count: int, parent: int | None, tokens: bool, limit: int) -> None:
    hashes = [index * 7 + 1 for index in range(count)]
    whole = Stored(
        Tier.CPU, pack_hashes(hashes), parent, pack_hashes(hashes) if tokens else b"", 9, 4, "node", "other", "t"
    )
    pieces = [piece for piece in split_event(whole, limit) if isinstance(piece, Stored)]
    assert b"".join(piece.engine_hashes for piece in pieces) == whole.engine_hashes
    assert b"".join(piece.content_hashes for piece in pieces) == whole.content_hashes
    assert pieces[0].parent == parent
    for before, after in pairwise(pieces):
        last = unpack_hashes(before.engine_hashes)[-1]
        assert after.parent == (last if tokens or parent is not None else None)
        assert len(before.engine_hashes) == len(before.content_hashes) or not tokens
    for piece in pieces:
        assert (piece.tier, piece.root, piece.block_size, piece.backend_id, piece.model, piece.tenant) == (
            Tier.CPU, 9, 4, "node", "other", "t",
        )  # fmt: skip
        assert event_bytes(piece) <= limit or len(piece.engine_hashes) == 8


def test_a_pool_batch_carries_no_engine_traits() -> None:
    pool = publishers_of(PoolRecord(instance_id="pool", model="m", block_size=4, endpoint="tcp://h:2"))[0]
    buffer = BatchBuffer(10, 1000)
    buffer.append(message(1, Cleared((Tier.CPU,), backend_id="node")))
    batch = buffer.head()
    assert batch is not None
    body = batch.body(pool)
    assert (body.source, body.own_tiers, body.counted) == ("pool", (), False)
