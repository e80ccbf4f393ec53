"""A sleeping engine has given its KV cache up, and an idle one never says so: the index is told in its place."""

import time

from nats.js import JetStreamContext

from schemas.blocks import Tier
from schemas.events import WIRE_VERSION, IndexBatch, IndexCleared, IndexGroup, Worker, encode
from schemas.registry import EngineRecord
from schemas.subjects import index_subject


async def clear_npu(js: JetStreamContext, engine: EngineRecord) -> None:
    """Take an engine rank's NPU blocks out of every router's index. Raises nats.errors.Error."""
    cleared = IndexCleared(Worker(engine.instance_id, engine.dp_rank), (Tier.NPU,))
    # Without a place in KV_EVENTS, and of whatever generation is the present one (the publisher may have restarted
    # since its registration): 0 would be discarded, a higher one would end its life.
    group = IndexGroup(0, "engine", engine.instance_id, engine.dp_rank, engine.generation, 0, 0, time.time(), [cleared])
    body = encode(IndexBatch(WIRE_VERSION, engine.model, engine.tenant, [group]))
    await js.publish(index_subject(engine.model, engine.tenant), body)
