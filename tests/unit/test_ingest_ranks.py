"""Sockets that carry several data-parallel ranks."""

from typing import Any

import msgpack

from schemas.blocks import Tier
from schemas.registry import EngineRecord
from schemas.streams import StreamState
from schemas.wire.frames import ReplayMessage
from services.ingest.arrivals import Arrival, Lifetime
from services.ingest.batching import BatchBuffer
from services.ingest.intake import DROPPED_OTHER_RANK, Intake
from services.ingest.outcomes import MemoryBudget
from services.ingest.ranks import Owner, RankGate
from services.ingest.registrations import publishers_by_key
from services.ingest.repair import RepairPolicy, begin_round
from services.ingest.stream import Stream

SOCKET = "tcp://10.0.0.5:5557"


def engine(dp_rank: int = 0, endpoint: str = SOCKET, **more: Any) -> EngineRecord:
    return EngineRecord(
        instance_id="a", model="m", block_size=4, dp_rank=dp_rank, generation=1, endpoints={Tier.NPU: endpoint}, **more
    )


def intakes(*records: EngineRecord) -> list[Intake]:
    return [
        Intake(publisher, Stream(Lifetime(1)), BatchBuffer(100, 100_000), MemoryBudget(10**6), 10**6, 10**6)
        for publisher in publishers_by_key(records).values()
    ]


def store(value: int, parent: int | None = None) -> list[Any]:
    return ["BlockStored", [value], parent, [value] * 4, 4, None, "GPU"]


def send(intake: Intake, seq: int, dp_rank: int | None, at: float, *events: Any) -> list[Arrival | None]:
    payload = msgpack.packb([at, list(events), dp_rank])
    return [outcome.arrival for outcome in intake.handle([b"", seq.to_bytes(8, "big"), payload], 1000.0)]


def test_dp_02_the_rank_is_the_ports_whatever_the_batches_say() -> None:
    gate = RankGate(1)
    assert [gate.judge(0), gate.judge(0), gate.judge(None)] == [Owner.OWN] * 3
    assert gate.conflicts == 2


def test_t30_a_second_rank_on_a_socket_is_another_publishers() -> None:
    gate = RankGate(0)
    assert [gate.judge(rank) for rank in (0, 1, 0, 1, 2)] == [
        Owner.OWN,
        Owner.OTHER,
        Owner.OWN,
        Owner.OTHER,
        Owner.OTHER,
    ]
    assert gate.others == {1: 2, 2: 1}


def test_t30_the_registered_rank_is_found_although_another_one_was_heard_first() -> None:
    gate = RankGate(1)
    assert [gate.judge(rank) for rank in (0, 1, 0, 1)] == [Owner.OWN, Owner.FOUND, Owner.OTHER, Owner.OWN]


def test_a_flood_of_invented_ranks_is_bounded() -> None:
    gate = RankGate(0)
    for rank in range(5000):
        gate.judge(rank)
    assert len(gate.others) == 64


def test_t01_and_t30_ranks_that_share_a_socket_are_told_apart_and_a_lower_number_of_another_one_clears_nothing() -> (
    None
):
    zero, one = intakes(engine(0), engine(1))
    assert zero.publisher.shared
    assert one.publisher.shared
    for at, (seq, dp_rank) in enumerate([(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)], start=1):
        for intake in (zero, one):
            send(intake, seq, dp_rank, float(at), store(10 * dp_rank + seq + 1))
    for intake in (zero, one):
        assert (intake.stream.last_seq, intake.stream.restarts, intake.stream.gaps) == (2, 0, 0)
        assert intake.stream.state is StreamState.LIVE
        assert intake.counts.messages.dropped == {DROPPED_OTHER_RANK: 3}
        assert intake.unaccounted == 0


def test_a_restart_of_one_rank_on_a_shared_socket_clears_that_rank_alone() -> None:
    zero, one = intakes(engine(0), engine(1))
    at = 1.0
    for seq, dp_rank in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 1)]:
        at += 1
        for intake in (zero, one):
            send(intake, seq, dp_rank, at, store(1))
    assert (zero.stream.restarts, one.stream.restarts) == (0, 1)


def test_ranks_with_sockets_of_their_own_share_nothing() -> None:
    assert [intake.publisher.shared for intake in intakes(engine(0), engine(1, "tcp://10.0.0.5:5558"))] == [False] * 2


def test_t02_a_first_message_that_only_a_warm_cache_can_have_sent_does_not_clear() -> None:
    (intake,) = intakes(engine())
    send(intake, 0, 0, 1.0, store(11))
    send(intake, 1, 0, 2.0, store(12, 11))
    assert send(intake, 0, 0, 3.0, store(13, 12)) == [Arrival.COUNTER_RESET]
    assert intake.stream.generation == 1
    assert send(intake, 0, 0, 4.0, store(21), store(22, 21)) == [Arrival.RESTART]
    assert intake.stream.generation > 1


def test_t10_a_refused_event_that_matters_is_said_and_one_that_does_not_is_not() -> None:
    (intake,) = intakes(engine())
    hybrid = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    hybrid |= {"block_size": 4, "lora_id": None, "medium": "GPU", "kv_cache_spec_kind": "mamba"}
    send(intake, 0, 0, 1.0, hybrid)
    assert intake.stream.state is StreamState.LIVE
    send(intake, 1, 0, 2.0, ["BlockStored", [7], None, [1] * 8, 8, None, "GPU"])
    assert (intake.stream.state, intake.stream.reason) == (StreamState.GAPPED, "events refused: block_size_mismatch")


def test_t18_a_clear_makes_a_gapped_engine_whole_unless_it_has_tiers_of_its_own() -> None:
    for own_tiers, expected in (((), StreamState.LIVE), ((Tier.CPU,), StreamState.GAPPED)):
        (intake,) = intakes(engine(own_tiers=own_tiers))
        send(intake, 0, 0, 1.0, store(1))
        send(intake, 5, 0, 2.0, store(2))
        send(intake, 6, 0, 3.0, ["AllBlocksCleared"])
        assert intake.stream.state is expected


def test_t09_every_message_of_a_replay_is_accounted_for() -> None:
    (publisher,) = publishers_by_key([engine(replay_endpoint="tcp://10.0.0.5:6557")]).values()
    stream = Stream(Lifetime(1), repairable=True)
    intake = Intake(publisher, stream, BatchBuffer(100, 100_000), MemoryBudget(10**6), 10**6, 10**6)
    payloads = [msgpack.packb([float(seq), [store(seq + 1)], 0]) for seq in range(6)]
    intake.connected(True, 1.0)
    intake.handle([b"", (5).to_bytes(8, "big"), payloads[5]], 1.0)
    assert (intake.counts.messages.pending, intake.unaccounted) == (1, 0), "one waits"
    begin_round(stream)
    for seq in (0, 1, 1, 2, 3, 4, 5):
        intake.handle_replayed(ReplayMessage(seq, payloads[seq]), 2.0)
    intake.replay_ended(True, 2.0, RepairPolicy())
    assert stream.state is StreamState.LIVE
    assert intake.counts.messages.received == 8
    assert intake.counts.messages.dropped.total() == 2
    assert (intake.buffer.messages, intake.unaccounted) == (6, 0)
