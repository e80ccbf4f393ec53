"""A simulated engine as a client, a subscriber and a pool see it, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.sim.engine import EngineSettings, SimulatedEngine
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.memcache_events import MetaServiceNames
from kvroute.sim.metaservice import SimulatedMetaService
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.timing import Speed

BLOCK_SIZE = 4
FAST = Speed(prefill=1e9, overhead=0.0, per_output_token=0.0)
DEADLINE_SECONDS = 5.0


class Subscriber:
    """A SUB that decodes batches; ``connected`` returns once the publisher knows the subscription."""

    def __init__(self, context: zmq.asyncio.Context, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(publisher.endpoint)

    async def connected(self) -> None:
        await asyncio.wait_for(self._publisher.subscribed(), DEADLINE_SECONDS)

    async def next(self) -> tuple[bytes, int, Any]:
        topic, sequence, payload = await asyncio.wait_for(self._socket.recv_multipart(), DEADLINE_SECONDS)
        return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(EngineSettings("e", "m", RankSpec(BLOCK_SIZE, 32), dp_size=2, speed=FAST))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def client(engine: SimulatedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        yield client


def completion(tokens: list[int] | str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": tokens, "max_tokens": 1, **more}


async def test_a_repeated_prompt_reports_its_cached_tokens(client: httpx.AsyncClient) -> None:
    headers = {"X-data-parallel-rank": "1"}
    cached = []
    for _ in range(2):
        response = await client.post("/v1/completions", json=completion(list(range(9))), headers=headers)
        usage = response.json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert usage["prompt_tokens"] == 9
    assert cached == [0, 8]


async def test_the_header_chooses_the_rank_and_each_rank_has_a_publisher_and_sequence_of_its_own(
    engine: SimulatedEngine, client: httpx.AsyncClient, context: zmq.asyncio.Context
) -> None:
    subscribers = [Subscriber(context, server.publisher) for server in engine.ranks]
    for subscriber in subscribers:
        await subscriber.connected()
    for rank in (1, 0, 1):
        body = completion([rank] * 4 + [int(engine.ranks[rank].rank.pool.cached_blocks)] * 5)
        await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
    topic, sequence, (_, events, dp_rank) = await subscribers[0].next()
    assert (topic, sequence, dp_rank) == (b"kv-events", 0, 0)
    assert events[0]["type"] == "BlockStored"
    assert [(await subscribers[1].next())[1:2] for _ in range(2)] == [(0,), (1,)]


async def test_an_unknown_rank_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=completion([1]), headers={"X-data-parallel-rank": "2"})
    assert response.status_code == 400
    assert "must be below 2" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not JSON"),
        (b'{"prompt": []}', 400, "must not be empty"),
        (b'{"prompt": [-1]}', 400, "prompt"),
        (b'{"prompt": "x", "model": "other"}', 404, "`other` does not exist"),
        (b'{"prompt": "x", "max_tokens": 5000}', 400, "blocks"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(
    client: httpx.AsyncClient, body: bytes, status: int, says: str
) -> None:
    response = await client.post("/v1/completions", content=body)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]


async def test_a_stream_ends_with_usage_and_done(client: httpx.AsyncClient) -> None:
    body = completion("hello", max_tokens=3, stream=True, stream_options={"include_usage": True})
    response = await client.post("/v1/completions", json=body)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    chunks = [msgspec.json.decode(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 0]
    assert chunks[2]["choices"][0]["finish_reason"] == "length"
    assert chunks[3]["usage"]["prompt_tokens"] == 5


async def test_chat_and_tokenize_agree_on_the_prompt(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await client.post("/tokenize", json={"messages": messages})).json()
    chat = (await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})).json()
    assert chat["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    assert len(chat["choices"][0]["message"]["content"]) == 2


async def test_plain_text_is_tokenised_by_bytes(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"prompt": "é!"})).json()["tokens"] == [0xC3, 0xA9, 0x21]


async def test_metrics_have_the_names_vllm_uses(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json=completion(list(range(9))), headers={"X-data-parallel-rank": "0"})
    text = (await client.get("/metrics")).text
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 9.0' in text
    assert "vllm:kv_cache_usage_perc" in text
    assert "vllm:num_requests_running" in text


async def replayed(context: zmq.asyncio.Context, endpoint: str, request: list[bytes]) -> list[list[bytes]]:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    await dealer.send_multipart(request)
    replies = []
    while not replies or replies[-1][-2] != b"\xff" * 8:
        replies.append(await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_SECONDS))
    dealer.close(linger=0)
    return replies


async def test_replay_answers_in_the_shape_of_recent_releases(
    engine: SimulatedEngine, client: httpx.AsyncClient, context: zmq.asyncio.Context
) -> None:
    for number in range(3):
        body = completion([number] * 5)
        await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "0"})
    replies = await replayed(context, engine.replay_endpoint(0), [b"", (1).to_bytes(8, "big")])
    assert [reply[:3] for reply in replies[:-1]] == [[b"", b"kv-events", n.to_bytes(8, "big")] for n in (1, 2)]
    assert replies[-1] == [b"", b"", b"\xff" * 8, b""]


async def test_a_malformed_replay_request_is_ignored_and_the_next_one_answered(
    engine: SimulatedEngine, context: zmq.asyncio.Context
) -> None:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(engine.replay_endpoint(0))
    await dealer.send_multipart([(0).to_bytes(8, "big")])
    await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    assert await asyncio.wait_for(dealer.recv_multipart(), DEADLINE_SECONDS) == [b"", b"", b"\xff" * 8, b""]
    dealer.close(linger=0)


async def test_reset_is_told_with_the_next_prompt_as_a_real_engine_does(
    engine: SimulatedEngine, client: httpx.AsyncClient, context: zmq.asyncio.Context
) -> None:
    subscriber = Subscriber(context, engine.ranks[0].publisher)
    await subscriber.connected()
    headers = {"X-data-parallel-rank": "0"}
    await client.post("/v1/completions", json=completion([1] * 5), headers=headers)
    assert (await client.post("/reset_prefix_cache")).status_code == 200
    await client.post("/v1/completions", json=completion([2] * 5), headers=headers)
    await subscriber.next()
    _, sequence, (_, events, _) = await subscriber.next()
    assert (sequence, [event["type"] for event in events]) == (1, ["AllBlocksCleared", "BlockStored"])


async def test_blocks_of_one_engine_are_found_in_the_pool_by_another(context: zmq.asyncio.Context) -> None:
    pool = SimulatedMetaService(MetaServiceNames("m", BLOCK_SIZE))
    await pool.start()
    subscriber = Subscriber(context, pool.publisher)
    await subscriber.connected()
    engines = [
        SimulatedEngine(
            EngineSettings(
                name, "m", RankSpec(BLOCK_SIZE, 16), host=host, speed=FAST, pool_url=pool.url, pool_cpu_blocks=8
            )
        )
        for name, host in (("a", "127.0.0.1"), ("b", "127.0.0.2"))
    ]
    for engine in engines:
        await engine.start()
    kv_hits = []
    async with httpx.AsyncClient(trust_env=False) as client:
        for engine in engines:
            body = completion(list(range(9)), max_tokens=2)
            kv_hits.append((await client.post(f"{engine.url}/v1/completions", json=body)).json()["kv_hits"])
    _, first_sequence, batch = await subscriber.next()
    assert first_sequence == 1
    assert [(e["event_type"], e["medium"], e["backend_id"]) for e in batch["events"]] == [
        ("stored", "cpu", "127.0.0.1"),
        ("stored", "cpu", "127.0.0.1"),
    ]
    assert kv_hits == [
        {"npu_blocks": 0, "cpu_blocks": 0, "disk_blocks": 0},
        {"npu_blocks": 0, "cpu_blocks": 2, "disk_blocks": 0},
    ]
    await engines[0].stop()
    _, _, batch = await subscriber.next()
    assert [(e["event_type"], e["backend_id"]) for e in batch["events"]] == [("cleared", "127.0.0.1")]
    await engines[1].stop()
    await pool.stop()


async def test_an_engine_goes_on_without_its_pool() -> None:
    pool = SimulatedMetaService(MetaServiceNames("m", BLOCK_SIZE))
    await pool.start()
    settings = EngineSettings("a", "m", RankSpec(BLOCK_SIZE, 16), speed=FAST, pool_url=pool.url, pool_cpu_blocks=8)
    engine = SimulatedEngine(settings)
    await engine.start()
    await pool.stop()
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        response = await client.post("/v1/completions", json=completion(list(range(9)), max_tokens=2))
    assert response.status_code == 200
    assert engine.ranks[0].pool_failures == 2
    await engine.stop()


async def test_an_engine_lends_its_room_again_after_the_pool_restarted() -> None:
    pool = SimulatedMetaService(MetaServiceNames("m", BLOCK_SIZE))
    await pool.start()
    settings = EngineSettings("a", "m", RankSpec(BLOCK_SIZE, 16), speed=FAST, pool_url=pool.url, pool_cpu_blocks=8)
    engine = SimulatedEngine(settings)
    await engine.start()
    pool.store = type(pool.store)()
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        await client.post("/v1/completions", json=completion(list(range(9)), max_tokens=2))
    assert pool.store.used("cpu") == 2
    await engine.stop()
    await pool.stop()
