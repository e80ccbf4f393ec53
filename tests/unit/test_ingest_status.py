"""What ``GET /publishers`` says of one publisher."""

from types import SimpleNamespace

import msgpack
import orjson

from schemas.registry import EngineRecord
from schemas.wire.types import RejectReason
from services.ingest.arrivals import Lifetime
from services.ingest.batching import BatchBuffer
from services.ingest.intake import Intake
from services.ingest.outcomes import MemoryBudget
from services.ingest.registrations import publishers_of
from services.ingest.status import publisher_status
from services.ingest.stream import Stream
from services.ingest.subscriptions import Subscription


def subscription() -> Subscription:
    record = EngineRecord(
        instance_id="a", model="m", block_size=4, generation=1, endpoints={"npu": "tcp://10.0.0.5:5557"}
    )
    (publisher,) = publishers_of(record)
    intake = Intake(publisher, Stream(Lifetime(1)), BatchBuffer(10, 10_000), MemoryBudget(10_000), 10_000, 10_000)
    return Subscription(intake, SimpleNamespace())  # type: ignore[arg-type]


def test_ev_07_refusals_are_told_by_reason_as_json() -> None:
    publisher = subscription()
    publisher.intake.handle([b"payload alone"], now=1.0)
    publisher.intake.handle([b"topic", bytes(4), b"payload"], now=1.0)
    publisher.intake.handle([b"topic", bytes(8), b"\xc1"], now=1.0)
    publisher.intake.counts.events.rejected[RejectReason.BAD_HASH] += 2
    status = orjson.loads(orjson.dumps(publisher_status(publisher, now=2.0)))
    assert status["messages"]["rejected"] == {"frame_count": 1, "sequence_width": 1, "wrong_shape": 1}
    assert status["messages"]["pending"] == 0
    assert status["events"]["rejected"] == {"bad_hash": 2}
    assert status["age_seconds"] == 1.0


def test_t21_a_disagreeing_block_size_stands_in_the_status_with_both_sizes() -> None:
    publisher = subscription()
    event = ["BlockStored", [7], None, [1] * 8, 8, None, "GPU"]
    publisher.intake.handle([b"", bytes(8), msgpack.packb([1.0, [event], 0])], now=1.0)
    status = publisher_status(publisher, now=2.0)
    assert status["block_size"] == {"registered": 4, "disagreeing": 8}
    assert (status["state"], status["reason"]) == ("gapped", "events refused: block_size_mismatch")
