"""Clients of the service that this one replaces work unchanged: bodies, status codes, encodings.

Deviations are in docs/compatibility.md; each row of that table that a client can see is a test here.
"""

import struct
from typing import Any

import httpx
import msgpack
import pytest

from kvroute.embedded import EmbeddedStack
from tests.e2e.support import eventually, unique

BLOCK = 4
TOKENS = list(range(1, 9))


class Client:
    """The calls of an existing client, with its field names."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.model = unique("existing")

    def registration(self, instance_id: str, dp_rank: int = 0, **changes: Any) -> dict[str, Any]:
        body = {
            "instance_id": instance_id,
            "type": "vLLM",
            "modelname": self.model,
            "block_size": BLOCK,
            "dp_rank": dp_rank,
            "store_backend": "Memcache",
        }
        return body | changes

    async def register(self, instance_id: str, dp_rank: int = 0, **changes: Any) -> httpx.Response:
        return await self.http.post("/register", json=self.registration(instance_id, dp_rank, **changes))

    async def query(self, tokens: list[int] = TOKENS, **changes: Any) -> httpx.Response:
        body = {"model": self.model, "block_size": BLOCK, "token_ids": tokens} | changes
        return await self.http.post("/query", json=body)

    async def store(self, instance_id: str, dp_rank: int = 0, **changes: Any) -> httpx.Response:
        event = {"event_id": 1, "dp_rank": dp_rank, "event_type": "stored", "block_hashes": [11, 12]}
        event |= {"token_ids": TOKENS, "block_size": BLOCK}
        return await self.http.post("/events", json={"instance_id": instance_id, "events": [event | changes]})

    async def instance(self, instance_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.query()).json()["default"][instance_id]
        return answer


@pytest.fixture
async def client(stack: EmbeddedStack) -> Any:
    async with httpx.AsyncClient(base_url=stack.router_url, timeout=10.0, trust_env=False) as http:
        yield Client(http)


def coverage(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the words about streams, which have a time of their own."""
    return {
        tenant: {instance: entry | {"streams": ...} for instance, entry in instances.items()}
        for tenant, instances in answer.items()
    }


def name(kind: str = "vllm-prefill") -> str:
    return unique(kind)


async def test_health_is_the_text_ok(client: Client) -> None:
    answer = await client.http.get("/health")
    assert (answer.status_code, answer.text) == (200, "OK")


async def test_register_query_and_unregister(client: Client) -> None:
    instance = name()
    answer = await client.register(instance)
    assert (answer.status_code, answer.json()) == (201, {"status": "ok"})
    assert (await client.register(instance)).status_code == 201
    assert (await client.store(instance)).json() == {"status": "ok", "events_applied": 1}
    answer = await client.query()
    assert answer.status_code == 200
    entry = answer.json()["default"][instance]
    assert entry["longest_matched"] == 8
    rank = entry["DP"]["0"]
    assert {key: rank[key] for key in ("matched_tokens", "npu_blocks", "cpu_blocks", "disk_blocks")} == {
        "matched_tokens": 8,
        "npu_blocks": 2,
        "cpu_blocks": 0,
        "disk_blocks": 0,
    }
    answer = await client.http.post("/unregister", json=client.registration(instance))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert instance not in (await client.http.get("/workers")).text


async def test_an_instance_without_a_hit_is_listed_with_zeros(client: Client) -> None:
    hit, cold = name(), name()
    await client.register(hit)
    await client.register(cold)
    await client.store(hit)
    entry = await client.instance(cold)
    assert entry["longest_matched"] == 0
    assert set(entry["DP"]["0"].values()) == {0}


async def test_every_dp_rank_has_an_entry_and_the_longest_counts(client: Client) -> None:
    instance = name()
    for rank in (0, 1):
        await client.register(instance, rank)
    await client.store(instance, 1)
    entry = await client.instance(instance)
    assert entry["longest_matched"] == 8
    assert {rank: counts["matched_tokens"] for rank, counts in entry["DP"].items()} == {"0": 0, "1": 8}


async def test_workers_lists_registrations_as_controllers_compare_them(client: Client) -> None:
    instance = name()
    endpoints = {"medium_endpoints": {"npu": "tcp://10.77.0.1:5557"}, "replay_endpoint": "tcp://10.77.0.1:6667"}
    await client.register(instance, 1, **endpoints)
    body = (await client.http.get("/workers")).json()
    (worker,) = [worker for worker in body["workers"] if worker["instance_id"] == instance]
    assert (worker["model_name"], worker["tenant_id"], worker["block_size"]) == (client.model, "default", BLOCK)
    endpoint = worker["endpoints"]["1"]
    assert endpoint["medium_endpoints"] == {"npu": "tcp://10.77.0.1:5557"}
    assert (endpoint["engine_type"], endpoint["dp_rank"], endpoint["replay_endpoint"]) == (
        "vLLM", 1, "tcp://10.77.0.1:6667"
    )  # fmt: skip
    (indexer,) = [entry for entry in body["indexer"] if entry["model_name"] == client.model]
    assert (indexer["worker_count"], indexer["total_blocks"]) == (1, 0)
    await client.http.post("/unregister", json=client.registration(instance, 1))


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/x-msgpack", "Application/MsgPack; v=1"])
async def test_msgpack_questions_get_the_same_answer_in_msgpack(client: Client, content_type: str) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    body = {"model": client.model, "block_size": BLOCK, "token_ids": TOKENS}
    packed = msgpack.packb(body)
    answer = await client.http.post("/query", content=packed, headers={"content-type": content_type})
    assert answer.headers["content-type"] == "application/msgpack"
    assert coverage(msgpack.unpackb(answer.content)) == coverage((await client.query()).json())
    raw_tokens = msgpack.packb(body | {"token_ids": struct.pack("<8I", *TOKENS)})
    answer = await client.http.post("/query", content=raw_tokens, headers={"content-type": content_type})
    assert coverage(msgpack.unpackb(answer.content)) == coverage((await client.query()).json())
    answer = await client.http.post("/query", content=b"\xc1", headers={"content-type": content_type})
    assert answer.status_code == 400
    assert "error" in msgpack.unpackb(answer.content)


async def test_raw_tokens_with_the_rest_in_the_query_string(client: Client) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    headers = {"content-type": "application/octet-stream"}
    url = f"/query?model={client.model}&block_size={BLOCK}"
    answer = await client.http.post(url, content=struct.pack("<8I", *TOKENS), headers=headers)
    assert coverage(answer.json()) == coverage((await client.query()).json())
    answer = await client.http.post(url, content=b"12345", headers=headers)
    assert answer.status_code == 400
    assert "little-endian u32" in answer.json()["error"]


async def test_query_by_hash_takes_content_or_rolling_hashes(client: Client) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    hashes = [14643705804678351452, 16777012769546811212]
    body = {"model": client.model, "block_hashes": hashes}
    entry = (await client.http.post("/query_by_hash", json=body)).json()["default"][instance]
    assert entry["DP"]["0"]["npu_blocks"] == 2
    assert entry["longest_matched"] == 2
    entry = (await client.http.post("/query_by_hash", json=body | {"block_size": 4})).json()["default"][instance]
    assert entry["longest_matched"] == 8
    rolling = {"model": client.model, "seq_hashes": [hashes[0]], "block_size": 4}
    entry = (await client.http.post("/query_by_hash", json=rolling)).json()["default"][instance]
    assert entry["longest_matched"] == 4
    answer = await client.http.post("/query_by_hash", json={"model": client.model})
    assert answer.status_code == 400
    assert "block_hashes" in answer.json()["error"]


async def test_a_model_nobody_knows_is_404(client: Client) -> None:
    answer = await client.query()
    assert answer.status_code == 404
    assert answer.json() == {"error": f"no indexer for model={client.model} tenant=default"}


async def test_empty_tokens_are_legal(client: Client) -> None:
    instance = name()
    await client.register(instance)
    answer = await client.query([])
    assert (answer.status_code, answer.json()["default"][instance]["longest_matched"]) == (200, 0)


async def test_bs_05_a_prompt_shorter_than_a_block_matches_nothing(client: Client) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    assert (await client.query(TOKENS[:3])).json()["default"][instance]["longest_matched"] == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 5000}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1, "x"]}, "token_ids"),
        ({"token_ids": [1, None]}, "token_ids"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"tenant_id": 5}, "tenant_id"),
        ({"lora_id": "seven"}, "lora_id"),
        ({"extra_keys": "k"}, "extra_keys"),
        ({"block_extra_keys": {"x": []}}, "block_extra_keys"),
    ],
)
async def test_a_bad_query_is_400_and_names_the_field(client: Client, changes: dict[str, Any], field: str) -> None:
    answer = await client.query(**changes)
    assert answer.status_code == 400
    assert field in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_400(client: Client, body: bytes) -> None:
    for path in ("/query", "/query_by_hash", "/events"):
        answer = await client.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "error" in answer.json()


async def test_tokens_outside_u32_wrap_like_a_cast(client: Client) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    wrapped = [token + 2**32 for token in TOKENS]
    assert (await client.query(wrapped)).json()["default"][instance]["longest_matched"] == 8


async def test_unregister_of_the_unknown_is_404_and_of_an_unknown_rank_200(client: Client) -> None:
    instance = name()
    answer = await client.http.post("/unregister", json=client.registration(instance))
    assert (answer.status_code, answer.json()["error"]) == (404, f"instance {instance} not found")
    await client.register(instance)
    answer = await client.http.post("/unregister", json=client.registration(instance, 7))
    assert answer.status_code == 200


async def test_bad_registrations_name_every_field(client: Client) -> None:
    answer = await client.http.post("/register", json={"instance_id": "", "block_size": 0, "dp_rank": -1})
    assert answer.status_code == 422
    for field in ("instance_id", "block_size", "dp_rank", "modelname"):
        assert field in answer.text


async def test_sq_06_unregistering_takes_the_blocks_away_at_once_and_for_good(client: Client) -> None:
    instance, other = name(), name()
    await client.register(instance)
    await client.register(other)
    await client.store(instance)
    await client.http.post("/unregister", json=client.registration(instance))
    assert instance not in (await client.query()).json()["default"]
    await client.register(instance)
    assert (await client.instance(instance))["longest_matched"] == 0


async def test_registering_again_unchanged_keeps_the_blocks_and_changed_drops_them(client: Client) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    await client.register(instance)
    assert (await client.instance(instance))["longest_matched"] == 8
    await client.register(instance, store_backend="YuanRong")

    async def longest() -> int:
        return int((await client.instance(instance))["longest_matched"])

    await eventually(longest, 0)


async def test_bs_07_another_block_size_in_one_space_leaves_the_first_alone(client: Client) -> None:
    fine, coarse = name(), name()
    await client.register(fine)
    await client.register(coarse, block_size=8)
    await client.store(fine)
    await client.store(coarse, block_hashes=[31], block_size=8)
    assert (await client.instance(fine))["longest_matched"] == 8
    entry = (await client.query(block_size=8)).json()["default"]
    assert (entry[fine]["longest_matched"], entry[coarse]["longest_matched"]) == (0, 8)


async def test_t15_posted_events_are_applied_one_by_one_and_the_bad_ones_are_listed(client: Client) -> None:
    instance = name()
    await client.register(instance)
    good = {"event_id": 2, "event_type": "stored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}
    events = [
        {"event_id": 1, "event_type": "flushed"},
        {"event_type": "removed", "block_hashes": [1]},
        {"event_id": 3, "event_type": "removed"},
        {"event_id": 4, "event_type": "stored", "block_hashes": [5], "medium": "tape"},
        {"event_id": 5, "event_type": "stored", "block_hashes": [5]},
        "text",
        good,
        {"event_id": 6, "event_type": "removed", "block_hashes": [999]},
    ]
    answer = await client.http.post("/events", json={"instance_id": instance, "events": events})
    assert answer.status_code == 500
    body = answer.json()
    assert (body["status"], body["events_applied"], len(body["errors"])) == ("partial", 2, 6)
    for word, error in zip(("flushed", "event_id", "hashes", "tape", "content", "object"), body["errors"], strict=True):
        assert word in error
    assert (await client.instance(instance))["longest_matched"] == 4


async def test_posted_events_of_all_kinds_and_spellings(client: Client) -> None:
    instance = name()
    await client.register(instance)
    blocks = [
        {"block_hash": 11, "tokens_hash": 14643705804678351452},
        {"block_hash": 12, "tokens_hash": 16777012769546811212},
    ]
    nested = {"event_id": 1, "data": {"type": "BlockStored", "blocks": blocks, "medium": "CPU"}}
    answer = await client.http.post("/events", json={"instance_id": instance, "events": [nested]})
    assert answer.json() == {"status": "ok", "events_applied": 1}
    rank = (await client.instance(instance))["DP"]["0"]
    assert (rank["cpu_blocks"], rank["cpu_local_blocks"], rank["npu_blocks"]) == (2, 2, 0)
    clear = {"event_id": 2, "event_type": "cleared", "medium": "cpu"}
    await client.http.post("/events", json={"instance_id": instance, "events": [clear]})
    assert (await client.instance(instance))["longest_matched"] == 0
    assert (await client.http.post("/events", json={"instance_id": instance, "events": []})).json()[
        "events_applied"
    ] == 0


async def test_posted_events_of_an_unknown_instance_are_an_error(client: Client) -> None:
    answer = await client.store(name())
    assert answer.status_code == 500
    assert "not found" in answer.json()["errors"][0]


async def test_ha_04_to_06_adapters_and_salts_never_mix(client: Client) -> None:
    instance = name()
    await client.register(instance)
    await client.store(instance)
    for namespace in ({"lora_name": "X"}, {"cache_salt": "X"}, {"extra_keys": ["X"]}, {"lora_id": 7}):
        assert (await client.query(**namespace)).json()["default"][instance]["longest_matched"] == 0


async def test_bodies_above_the_limit_are_413(client: Client) -> None:
    answer = await client.http.post(
        "/query?model=m&block_size=4",
        content=bytes(65 * 1024 * 1024),
        headers={"content-type": "application/octet-stream"},
    )
    assert answer.status_code == 413
    assert "max_body_bytes" in answer.json()["error"]


async def test_a_million_tokens_are_accepted_in_every_encoding(client: Client) -> None:
    instance = name()
    await client.register(instance)
    tokens = list(range(1_000_000))
    raw = struct.pack("<1000000I", *tokens)
    answers = [
        await client.query(tokens, block_size=128),
        await client.http.post(
            "/query",
            content=msgpack.packb({"model": client.model, "block_size": 128, "token_ids": raw}),
            headers={"content-type": "application/msgpack"},
        ),
        await client.http.post(
            f"/query?model={client.model}&block_size=128",
            content=raw,
            headers={"content-type": "application/octet-stream"},
        ),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200]


async def test_the_mooncake_dialect_answers_tokens_per_rank(client: Client) -> None:
    instance = name("mooncake-engine")
    body = {"endpoint": "tcp://10.77.0.9:5557", "type": "vLLM", "modelname": client.model, "instance_id": instance}
    body |= {"block_size": BLOCK, "dp_rank": 0}  # type: ignore[dict-item]
    answer = await client.http.post("/register", json=body)
    assert answer.json() == {"status": "registered successfully", "instance_id": instance}
    await client.store(instance)
    entry = await client.instance(instance)
    assert entry.pop("streams")["0"]["offered"] is True
    assert entry == {"longest_matched": 8, "GPU": 8, "CPU": 0, "DISK": 0, "DP": {"0": 8}}
    answer = await client.http.post("/unregister", json=body)
    assert answer.json() == {
        "status": "unregistered successfully",
        "removed_instances": [f"{instance}|default|0"],
    }


async def test_the_api_describes_itself(client: Client) -> None:
    openapi = (await client.http.get("/openapi.json")).json()
    assert {"/query", "/query_by_hash", "/register", "/unregister", "/events", "/workers"} <= openapi["paths"].keys()
    assert "/query_by_hash" in (await client.http.get("/docs")).text
    assert (await client.http.get("/query")).status_code == 405
    assert (await client.http.get("/nothing")).status_code == 404
