"""The registrar against a real NATS: generations, tombstones, conflicts and concurrent writers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import nats
import pytest
from nats.aio.client import Client
from nats.js.kv import KeyValue
from starlette.applications import Starlette

from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from schemas.subjects import engine_key
from services.runtime.broker import ensure_streams
from services.runtime.registrar import Registrar
from services.runtime.registration_routes import registration_routes
from services.runtime.registry_store import Registry, RegistryStore, RegistryWatch
from services.runtime.settings import NatsSettings
from tests.conftest import make_nats_server


def engine_body(instance_id: str = "A", dp_rank: int = 0, port: int = 5557, **changes: Any) -> dict[str, Any]:
    return {
        "instance_id": instance_id,
        "type": "vLLM",
        "modelname": "m",
        "block_size": 16,
        "dp_rank": dp_rank,
        "store_backend": "Memcache",
        "medium_endpoints": {"npu": f"tcp://127.0.0.1:{port}"},
        **changes,
    }


def pool_body(**changes: Any) -> dict[str, Any]:
    body = engine_body("memcache-pool", endpoint="tcp://127.0.0.1:5999", **changes)
    del body["medium_endpoints"]
    return body


class Place:
    """A registrar with its own watch, as each process has one. `now` is its clock."""

    def __init__(self, client: Client) -> None:
        self.now = 1_000.0
        self.store = RegistryStore(client.jetstream())
        self.watch = RegistryWatch(client.jetstream())
        self.registrar = Registrar(self.store, self.watch, "kvs-master", clock=lambda: self.now)

    async def engine(self, instance_id: str = "A", dp_rank: int = 0) -> EngineRecord:
        record, _ = await self.store.get(engine_key(instance_id, dp_rank))
        assert isinstance(record, EngineRecord)
        return record

    async def tombstone(self, instance_id: str = "A", dp_rank: int = 0) -> RetiredRecord:
        record, _ = await self.store.get(engine_key(instance_id, dp_rank))
        assert isinstance(record, RetiredRecord)
        return record


@pytest.fixture
async def place(nats_client: Client) -> AsyncIterator[Place]:
    await ensure_streams(nats_client.jetstream(), NatsSettings())
    place = Place(nats_client)
    await place.watch.start()
    yield place
    await place.watch.stop()


async def test_a_registration_is_answered_201_and_stands_in_the_registry(place: Place) -> None:
    answer = await place.registrar.register(engine_body())
    assert (answer.status, answer.body) == (201, {"status": "ok"})
    assert (await place.engine()).generation == 1_000_000


async def test_ht_04_repeating_the_same_body_keeps_the_generation(place: Place) -> None:
    await place.registrar.register(engine_body())
    place.now += 60
    answer = await place.registrar.register(engine_body(store_backend="MEMCACHE"))
    assert (answer.status, (await place.engine()).generation) == (201, 1_000_000)


async def test_a_changed_registration_starts_a_new_generation_even_when_the_clock_went_back(place: Place) -> None:
    await place.registrar.register(engine_body())
    place.now -= 500
    await place.registrar.register(engine_body(port=5558))
    assert (await place.engine()).generation == 1_000_001


async def test_another_model_tenant_or_block_size_replaces_the_registration(place: Place) -> None:
    for generation, change in enumerate(({}, {"modelname": "m2"}, {"tenant_id": "t"}, {"block_size": 64})):
        assert (await place.registrar.register(engine_body(**change))).status == 201
        assert (await place.engine()).generation == 1_000_000 + generation


async def test_bs_07_two_block_sizes_of_one_model_and_tenant_stand_side_by_side(place: Place) -> None:
    assert (await place.registrar.register(engine_body("A", block_size=16))).status == 201
    assert (await place.registrar.register(engine_body("B", port=5558, block_size=64))).status == 201
    assert ((await place.engine("A")).block_size, (await place.engine("B")).block_size) == (16, 64)


async def test_dp_03_two_instances_with_one_publisher_are_refused_whatever_its_spelling(place: Place) -> None:
    await place.registrar.register(engine_body("A", medium_endpoints={"npu": "tcp://[::1]:5557"}))
    answer = await place.registrar.register(engine_body("B", medium_endpoints={"npu": "tcp://[0:0:0:0:0:0:0:1]:5557"}))
    assert answer.status == 409
    assert "A" in answer.body["error"]
    assert answer.body["problems"][0]["field"] == "endpoint"
    assert (await place.store.get(engine_key("B", 0)))[0] is None


async def test_instances_of_one_node_may_share_its_cpu_worker(place: Place) -> None:
    for instance, port in (("A", 5557), ("B", 5558)):
        media = {"npu": f"tcp://127.0.0.1:{port}", "cpu": "tcp://127.0.0.1:31601"}
        assert (await place.registrar.register(engine_body(instance, medium_endpoints=media))).status == 201


async def test_an_id_is_an_engine_or_a_pool(place: Place) -> None:
    await place.registrar.register(pool_body())
    answer = await place.registrar.register(engine_body("memcache-pool"))
    assert (answer.status, answer.body["code"]) == (409, "kind_taken")


async def test_unregistering_leaves_a_tombstone_above_the_generation(place: Place) -> None:
    await place.registrar.register(engine_body())
    answer = await place.registrar.unregister(engine_body())
    assert (answer.status, answer.body) == (200, {"status": "ok"})
    assert (await place.tombstone()).generation == 1_000_001


async def test_t04_registering_again_after_unregistering_is_a_new_life(place: Place) -> None:
    await place.registrar.register(engine_body())
    await place.registrar.unregister(engine_body())
    await place.registrar.register(engine_body())
    assert (await place.engine()).generation == 1_000_002


async def test_t17_a_late_removal_of_an_earlier_life_leaves_the_present_one_alone(place: Place) -> None:
    await place.registrar.register(engine_body())
    old = (await place.engine()).generation
    await place.registrar.register(engine_body() | {"medium_endpoints": {"npu": "tcp://10.0.0.77:5557"}})
    new = (await place.engine()).generation
    late = await place.registrar.unregister(engine_body() | {"generation": old})
    assert (late.status, late.body["code"]) == (409, "later_life")
    assert str(new) in late.body["error"]
    assert (await place.engine()).generation == new
    for wrong in (0, -1, "x", True, 2**63):
        assert (await place.registrar.unregister(engine_body() | {"generation": wrong})).status == 422
    assert (await place.registrar.unregister(engine_body() | {"generation": new})).status == 200


async def test_an_endpoint_is_free_again_as_soon_as_its_owner_is_unregistered(place: Place) -> None:
    for instance in ("A", "B", "C"):
        assert (await place.registrar.register(engine_body(instance))).status == 201
        assert (await place.registrar.unregister(engine_body(instance))).status == 200


async def test_unregistering_an_unknown_instance_is_404_and_an_unknown_rank_of_a_known_one_200(place: Place) -> None:
    answer = await place.registrar.unregister(engine_body("X"))
    assert (answer.status, answer.body) == (404, {"error": "instance X not found"})
    await place.registrar.register(engine_body("A"))
    assert (await place.registrar.unregister(engine_body("A", dp_rank=7))).status == 200
    assert (await place.engine("A")).dp_rank == 0
    await place.registrar.unregister(engine_body("A"))
    assert (await place.registrar.unregister(engine_body("A"))).status == 404


async def test_a_pool_is_registered_with_the_kvs_master_service_and_unregistered_by_its_id(place: Place) -> None:
    await place.registrar.register(pool_body() | {"endpoint": "tcp://*:5557"})
    record = (await place.store.all())["pool.memcache-pool"]
    assert isinstance(record, PoolRecord)
    assert record.endpoint == "tcp://kvs-master:5557"
    assert (await place.registrar.unregister(pool_body())).status == 200


async def test_mooncake_callers_get_the_answers_they_know(place: Place) -> None:
    body = {
        "endpoint": "tcp://127.0.0.1:5557",
        "type": "vLLM",
        "modelname": "m",
        "instance_id": "mc",
        "block_size": 16,
        "dp_rank": 1,
        "tenant_id": "t",
    }
    answer = await place.registrar.register(body)
    assert (answer.status, answer.body) == (201, {"status": "registered successfully", "instance_id": "mc"})
    answer = await place.registrar.unregister(body)
    assert answer.body == {"status": "unregistered successfully", "removed_instances": ["mc|t|1"]}


async def test_deleting_an_instance_retires_all_its_ranks(place: Place) -> None:
    for rank in range(3):
        await place.registrar.register(engine_body("A", rank, 5557 + rank))
    await place.registrar.register(engine_body("B", port=5600))
    answer = await place.registrar.unregister_instance("A")
    assert (answer.status, answer.body["removed"]) == (200, 3)
    assert (await place.registrar.unregister_instance("A")).status == 404
    assert (await place.engine("B")).instance_id == "B"


async def test_ht_04_a_refused_body_leaves_nothing_behind(place: Place) -> None:
    answer = await place.registrar.register({"instance_id": "A", "dp_size": -1, "endpoint": "http://x"})
    assert answer.status == 422
    assert {problem["field"] for problem in answer.body["problems"]} >= {"dp_size", "endpoint"}
    assert await place.store.all() == {}


async def test_many_writers_of_one_key_lose_no_write_and_generations_strictly_rise(
    place: Place, nats_client: Client
) -> None:
    others = [Place(nats_client) for _ in range(3)]
    for other in others:
        await other.watch.start()
    seen: list[int] = []
    watching = RegistryWatch(
        nats_client.jetstream(),
        lambda registry: seen.extend(record.generation for record in registry.engines.values()),
    )
    await watching.start()
    answers = await asyncio.gather(
        *(writer.registrar.register(engine_body(port=6000 + i)) for i, writer in enumerate([place, *others])),
        *(writer.registrar.register(engine_body(tenant_id=f"t{i}")) for i, writer in enumerate([place, *others])),
    )
    assert [answer.status for answer in answers] == [201] * 8
    assert (await place.engine()).generation == 1_000_007
    assert await watching.wait_for_revision(place.watch.revision)
    assert seen == sorted(set(seen))
    for watch in (watching, *(other.watch for other in others)):
        await watch.stop()


async def test_of_two_processes_that_register_one_publisher_at_once_exactly_one_wins(
    place: Place, nats_client: Client
) -> None:
    other = Place(nats_client)
    await other.watch.start()
    for port in range(7000, 7010):
        answers = await asyncio.gather(
            place.registrar.register(engine_body(f"A{port}", port=port)),
            other.registrar.register(engine_body(f"B{port}", port=port)),
        )
        assert sorted(answer.status for answer in answers) == [201, 409]
        records = [record for record in (await place.store.all()).values() if isinstance(record, EngineRecord)]
        assert [record.endpoints["npu"] for record in records].count(f"tcp://127.0.0.1:{port}") == 1
    await other.watch.stop()


async def test_old_tombstones_are_removed_and_their_keys_can_be_used_again(place: Place) -> None:
    await place.registrar.register(engine_body())
    revision = (await place.store.get(engine_key("A", 0)))[1]
    await place.registrar.unregister(engine_body())
    assert await place.watch.wait_for_revision(revision + 1)
    assert await place.registrar.sweep(older_than=60) == 0
    place.now += 61
    assert await place.registrar.sweep(older_than=60) == 1
    assert await place.store.all() == {}
    assert (await place.registrar.register(engine_body())).status == 201
    assert (await place.engine()).generation == 1_061_000


async def test_a_registry_that_cannot_be_reached_is_answered_503_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.runtime.registrar.REQUEST_SECONDS", 0.5)
    server = make_nats_server(tmp_path)
    await asyncio.to_thread(server.start)
    client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
    await ensure_streams(client.jetstream(), NatsSettings())
    place = Place(client)
    await place.watch.start()
    server.kill()
    answers = await asyncio.gather(*(place.registrar.register(engine_body(f"A{i}", port=7000 + i)) for i in range(5)))
    assert {answer.status for answer in answers} == {503}
    await place.watch.stop()
    with contextlib.suppress(nats.errors.Error):
        await client.close()


@pytest.fixture
async def http(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=Starlette(routes=registration_routes(place.registrar)))
    async with httpx.AsyncClient(transport=transport, base_url="http://kvroute") as client:
        yield client


async def test_json_is_answered_in_json_and_msgpack_in_msgpack(http: httpx.AsyncClient) -> None:
    answer = await http.post("/register", json=engine_body())
    assert (answer.status_code, answer.json()) == (201, {"status": "ok"})
    packed = {"content-type": "application/x-MsgPack; charset=x"}
    answer = await http.post("/unregister", content=msgpack.packb(engine_body()), headers=packed)
    assert (answer.status_code, msgpack.unpackb(answer.content)) == (200, {"status": "ok"})


async def test_what_is_no_json_is_400_and_what_is_too_large_413(http: httpx.AsyncClient) -> None:
    answer = await http.post("/register", content=b"{nope")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_body")
    answer = await http.post("/register", content=b"\xc1", headers={"content-type": "application/msgpack"})
    assert (answer.status_code, msgpack.unpackb(answer.content)["code"]) == (400, "invalid_body")
    answer = await http.post("/register", content=b" " * (1024 * 1024 + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    answer = await http.post("/register", json=[])
    assert (answer.status_code, answer.json()["problems"][0]["field"]) == (422, "body")


async def test_a_process_that_still_waits_for_nats_answers_503() -> None:
    transport = httpx.ASGITransport(app=Starlette(routes=registration_routes(lambda: None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://kvroute") as client:
        answer = await client.post("/register", json=engine_body())
    assert (answer.status_code, answer.json()["code"]) == (503, "starting")


async def test_pausing_keeps_the_generation_and_a_repeated_registration_keeps_the_pause(place: Place) -> None:
    await place.registrar.register(engine_body())
    assert await place.registrar.set_paused("A", True) == 1
    await place.registrar.register(engine_body())
    assert ((await place.engine()).paused, (await place.engine()).generation) == (True, 1_000_000)
    assert await place.registrar.set_paused("A", True) == 0
    assert await place.registrar.set_paused("A", False) == 1
    assert not (await place.engine()).paused


async def test_a_keeper_takes_a_registration_over_without_a_new_life(place: Place) -> None:
    await place.registrar.register(engine_body())
    record = (await place.engine()).model_copy(update={"origin": "controller", "generation": 0})
    assert not await place.registrar.put(record)
    assert ((await place.engine()).origin, (await place.engine()).generation) == ("controller", 1_000_000)
    await place.registrar.register(engine_body())
    assert (await place.engine()).origin == "controller"


async def test_an_answer_is_never_ahead_of_this_process_s_own_view(place: Place) -> None:
    """A client that unregisters and then asks /workers must not see what it took away."""
    for round_number in range(30):
        instance = f"A{round_number}"
        assert (await place.registrar.register(engine_body(instance))).status == 201
        assert (instance, 0) in place.watch.registry.engines
        assert await place.registrar.set_paused(instance, True) == 1
        assert place.watch.registry.engines[instance, 0].paused
        assert (await place.registrar.unregister(engine_body(instance))).status == 200
        assert (instance, 0) not in place.watch.registry.engines
        assert (await place.registrar.register(engine_body(instance))).status == 201
        assert (await place.registrar.unregister_instance(instance)).status == 200
        assert (instance, 0) not in place.watch.registry.engines


async def test_a_no_values_marker_ahead_of_the_values_does_not_retire_every_engine(
    place: Place, nats_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py tells "no values" when the consumer's description overtakes the values on their way to the client."""
    for number in range(5):
        assert (await place.registrar.register(engine_body(f"A{number}", port=7000 + number))).status == 201
    watchall = KeyValue.watchall

    async def with_early_marker(bucket: KeyValue) -> Any:
        watcher = await watchall(bucket)
        updates, marker = watcher.updates, [None]

        async def early(timeout: float) -> Any:
            return marker.pop() if marker else await updates(timeout)

        monkeypatch.setattr(watcher, "updates", early)
        return watcher

    monkeypatch.setattr(KeyValue, "watchall", with_early_marker)
    views: list[int] = []
    watch = RegistryWatch(nats_client.jetstream(), lambda registry: views.append(len(registry.engines)))
    await asyncio.wait_for(watch.start(), 10)
    await watch.stop()
    assert views == [5]


async def test_a_watch_of_an_empty_bucket_is_complete_at_once(nats_client: Client) -> None:
    await ensure_streams(nats_client.jetstream(), NatsSettings())
    watch = RegistryWatch(nats_client.jetstream())
    await asyncio.wait_for(watch.start(), 10)
    await watch.stop()
    assert watch.registry == Registry()
