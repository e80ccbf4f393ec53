"""A sleeping engine has given its KV cache up, and an idle one never says so: the index is told in its place."""

import time

from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError

from schemas.blocks import Tier
from schemas.events import WIRE_VERSION, BodyError, IndexBatch, IndexCleared, IndexGroup, Worker, encode
from schemas.registry import EngineRecord
from schemas.streams import load_stream_record
from schemas.subjects import STREAMS_BUCKET, index_subject, stream_key


async def clear_npu(js: JetStreamContext, engine: EngineRecord) -> None:
    """Take an engine rank's NPU blocks out of every router's index. Raises nats.errors.Error."""
    generation = max(engine.generation, await _generation(js, engine))
    cleared = IndexCleared(Worker(engine.instance_id, engine.dp_rank), (Tier.NPU,))
    # Of the present generation: a lower one would be discarded, a higher one would end the publisher's life.
    group = IndexGroup(0, "engine", engine.instance_id, engine.dp_rank, generation, 0, 0, time.time(), [cleared])
    body = encode(IndexBatch(WIRE_VERSION, engine.model, engine.tenant, [group]))
    await js.publish(index_subject(engine.model, engine.tenant), body)


async def _generation(js: JetStreamContext, engine: EngineRecord) -> int:
    """The engine's present life as ingest sees it, 0 when ingest says nothing: it may have restarted since it was
    registered."""
    try:
        entry = await (await js.key_value(STREAMS_BUCKET)).get(stream_key("engine", engine.instance_id, engine.dp_rank))
        return load_stream_record(entry.value or b"").generation
    except (KeyNotFoundError, BodyError):
        return 0
