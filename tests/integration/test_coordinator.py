"""The coordinator as a whole: real NATS, real HTTP ports, messages as cluster controllers send them."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from nats.aio.client import Client

from schemas.registry import EngineRecord
from services.coordinator.app import Coordinator, coordinator
from services.runtime.config import Config
from services.runtime.health import Health
from tests.conftest import ServerProcess, free_port, make_nats_server


def config_of(server: ServerProcess, **section: Any) -> Config:
    ports = {"host": "127.0.0.1", "inference_port": 0, "management_port": 0, "metrics_port": 0, "keep_interval": 0.1}
    return Config.model_validate({"nats": {"url": server.url}, "coordinator": {**ports, **section}})


class Running:
    """A coordinator under test and clients of its ports."""

    def __init__(self, started: Coordinator, health: Health) -> None:
        self.cluster = started.cluster
        self.health = health
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{started.management_port}", trust_env=False)
        self.metrics = httpx.AsyncClient(base_url=f"http://127.0.0.1:{started.metrics_port}", trust_env=False)

    def engines(self) -> dict[tuple[str, int], EngineRecord]:
        assert self.cluster.watch is not None
        return self.cluster.watch.registry.engines

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"not reached; registered: {list(self.engines())}"
            await asyncio.sleep(0.01)

    async def refresh(self, event: str, *instances: dict[str, Any], **more: Any) -> httpx.Response:
        assert self.cluster.updates is not None
        before = self.cluster.updates.applied
        answer = await self.http.post("/instances/refresh", json={"event": event, "instances": instances, **more})
        if answer.status_code == 200:
            await self.until(lambda: self.cluster.updates is not None and self.cluster.updates.applied > before)
            assert self.cluster.registrar is not None
            await self.cluster.registrar.fresh_view()
        return answer


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[Running]:
    health = Health("coordinator")
    async with coordinator(config, health) as started:
        place = Running(started, health)
        async with place.http, place.metrics:
            yield place


@pytest.fixture
async def place(nats_server: ServerProcess, nats_client: Client) -> AsyncIterator[Running]:
    async with running(config_of(nats_server, replay_endpoint="tcp://*:6667", store_backend="memcache")) as place:
        yield place


def instance(number: int, role: str = "prefill", ip: str = "10.0.0.5", ranks: int = 1, **more: Any) -> dict[str, Any]:
    endpoints = {
        str(rank): {"id": rank, "ip": ip, "business_port": str(8000 + rank), "mgmt_port": "9000", "status": "normal"}
        for rank in range(ranks)
    }
    return {
        "job_name": f"job-{number}",
        "model_name": "qwen",
        "id": number,
        "role": role,
        "endpoints": {ip: endpoints},
        **more,
    }


async def test_registering_shows_up_in_instances_and_pools_with_its_age(place: Running) -> None:
    body = {
        "instance_id": "A",
        "type": "vLLM",
        "modelname": "qwen",
        "block_size": 128,
        "dp_rank": 0,
        "medium_endpoints": {"npu": "tcp://10.0.0.5:5557"},
    }
    assert (await place.http.post("/register", json=body)).status_code == 201
    pool = {**body, "instance_id": "memcache-pool", "endpoint": "tcp://kvs:5557", "store_backend": "memcache"}
    del pool["medium_endpoints"]
    assert (await place.http.post("/register", json=pool)).status_code == 201
    await place.until(lambda: len(place.engines()) == 1)
    (shown,) = (await place.http.get("/instances")).json()["instances"]
    assert (shown["instance_id"], shown["model_name"], list(shown["ranks"])) == ("A", "qwen", ["0"])
    assert shown["ranks"]["0"]["medium_endpoints"] == {"npu": "tcp://10.0.0.5:5557"}
    assert 0 <= shown["ranks"]["0"]["age_seconds"] < 60
    (shown,) = (await place.http.get("/pools")).json()["pools"]
    assert (shown["instance_id"], shown["endpoint"]) == ("memcache-pool", "tcp://kvs:5557")


async def test_ht_04_deleting_an_unknown_instance_is_404(place: Running) -> None:
    answer = await place.http.delete("/instances/unknown")
    assert (answer.status_code, answer.json()) == (404, {"error": "instance unknown not found"})


async def test_an_instance_is_deleted_by_its_name_whatever_it_contains(place: Running) -> None:
    body = {"instance_id": "a/b c", "type": "vLLM", "modelname": "qwen", "block_size": 128, "dp_rank": 0}
    assert (await place.http.post("/register", json=body)).status_code == 201
    assert (await place.http.delete("/instances/a%2Fb%20c")).status_code == 200


async def test_an_added_prefill_instance_is_registered_per_rank(place: Running) -> None:
    managers = [{"pod_ip": "10.0.0.5", "host_ip": "192.168.0.1", "port": "1"}]
    answer = await place.refresh("add", instance(3, ranks=2, node_managers=managers))
    assert (answer.status_code, answer.json()["accepted"]) == (200, ["vllm-prefill-3"])
    record = place.engines()["vllm-prefill-3", 1]
    assert record.endpoints == {"npu": "tcp://10.0.0.5:5558"}
    assert record.replay_endpoint == "tcp://10.0.0.5:6668"
    assert record.url == "http://10.0.0.5:8001"
    assert record.backend_ids == ("10.0.0.5", "192.168.0.1")
    assert (record.model, record.block_size, record.store_backend, record.origin) == (
        "qwen",
        128,
        "Memcache",
        "controller",
    )


async def test_ip_01_an_ipv6_instance_gets_bracketed_addresses(place: Running) -> None:
    await place.refresh("add", instance(1, ip="fd00::5", ranks=2))
    assert place.engines()["vllm-prefill-1", 1].endpoints == {"npu": "tcp://[fd00::5]:5558"}
    assert place.engines()["vllm-prefill-1", 1].url == "http://[fd00::5]:8001"


async def test_union_is_a_target_and_decode_and_encode_are_not(place: Running) -> None:
    answer = await place.refresh(
        "set",
        instance(1, "hybrid", "10.0.0.1"),
        instance(2, "decode", "10.0.0.2"),
        instance(3, "encode", "10.0.0.3"),
    )
    assert list(place.engines()) == [("vllm-union-1", 0)]
    assert answer.json()["not_targets"] == ["vllm-decode-2", "vllm-encode-3"]


async def test_a_set_removes_what_it_does_not_name_but_not_what_others_registered(place: Running) -> None:
    await place.http.post(
        "/register", json={"instance_id": "own", "type": "vLLM", "modelname": "qwen", "block_size": 128, "dp_rank": 0}
    )
    await place.refresh("set", instance(1, ip="10.0.0.1"), instance(2, ip="10.0.0.2", ranks=2))
    await place.refresh("pause", instance(2, ip="10.0.0.2"))
    assert set(place.engines()) == {("own", 0), ("vllm-prefill-1", 0), ("vllm-prefill-2", 0), ("vllm-prefill-2", 1)}
    await place.refresh("set", instance(1, ip="10.0.0.1"))
    assert set(place.engines()) == {("own", 0), ("vllm-prefill-1", 0)}
    await place.refresh("set")
    assert set(place.engines()) == {("own", 0)}


async def test_ranks_that_an_instance_lost_are_unregistered(place: Running) -> None:
    await place.refresh("add", instance(1, ranks=3))
    await place.refresh("add", instance(1, ranks=1))
    assert set(place.engines()) == {("vllm-prefill-1", 0)}


async def test_repeating_a_set_keeps_the_generations(place: Running) -> None:
    await place.refresh("set", instance(1))
    before = place.engines()["vllm-prefill-1", 0].generation
    await place.refresh("set", instance(1))
    assert place.engines()["vllm-prefill-1", 0].generation == before


async def test_pause_and_resume_keep_the_registration(place: Running) -> None:
    await place.refresh("add", instance(1))
    generation = place.engines()["vllm-prefill-1", 0].generation
    await place.refresh("pause", instance(1))
    assert place.engines()["vllm-prefill-1", 0].paused
    assert (await place.http.get("/instances")).json()["instances"][0]["paused"]
    await place.refresh("resume", instance(1))
    record = place.engines()["vllm-prefill-1", 0]
    assert (record.paused, record.generation) == (False, generation)


async def test_del_unregisters_whoever_registered_it(place: Running) -> None:
    await place.refresh("add", instance(1))
    await place.refresh("del", instance(1))
    await place.refresh("del", instance(99))
    assert place.engines() == {}


async def test_the_short_form_of_external_deployers_is_understood(place: Running) -> None:
    short = {
        "id": 1,
        "role": "prefill",
        "endpoints": [{"id": 0, "address": "10.0.0.1:8100"}, {"id": 1, "address": "[fd00::2]:8100"}],
    }
    await place.refresh("set", short, model_name="qwen", engine_type="vllm")
    assert place.engines()["vllm-prefill-1", 0].url == "http://10.0.0.1:8100"
    assert place.engines()["vllm-prefill-1", 1].endpoints == {"npu": "tcp://[fd00::2]:5558"}


async def test_a_bad_instance_is_refused_alone_and_named(place: Running) -> None:
    answer = await place.refresh("add", instance(1), {"id": 2, "role": "prefill", "endpoints": {}}, {"role": "prefill"})
    assert list(place.engines()) == [("vllm-prefill-1", 0)]
    assert set(answer.json()["refused"]) == {"vllm-prefill-2", "instances.2"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"event":"grow","instances":[]}', b'{"event":"add","instances":[]}', b'{"event":"set"}'],
)
async def test_a_message_that_is_none_is_400(place: Running, body: bytes) -> None:
    assert (await place.http.post("/instances/refresh", content=body)).status_code == 400


async def test_probes_and_metrics_answer(place: Running) -> None:
    for path in ("/startup", "/liveness", "/readiness", "/livez", "/readyz", "/metrics", "/"):
        assert (await place.http.get(path)).status_code == 200, path
    assert (await place.metrics.get("/health")).json()["status"] == "healthy"
    assert "kvroute_registered_ranks 0.0" in (await place.metrics.get("/metrics")).text
    assert (await place.metrics.get("/metrics?type=nope")).status_code == 400
    assert (await place.metrics.get("/metrics?type=instance")).status_code == 200
    assert (await place.metrics.get("/instance/metrics")).status_code == 410


async def test_the_files_registrations_are_kept_and_those_it_drops_go(
    nats_server: ServerProcess, nats_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVS_MASTER_SERVICE", "kvs-master")
    engines = [
        {"instance_id": f"e{rank}", "host": "10.0.0.5", "port": 5557, "dp_rank": rank, "model": "qwen"}
        for rank in (0, 1)
    ]
    section = {"store_backend": "memcache", "block_size": 16, "pool_endpoint": "tcp://*:5557"}
    async with running(config_of(nats_server, engines=engines, **section)) as place:
        await place.until(lambda: set(place.engines()) == {("e0", 0), ("e1", 1)})
        assert place.engines()["e1", 1].endpoints == {"npu": "tcp://10.0.0.5:5558"}
        assert place.engines()["e1", 1].block_size == 16
        assert place.cluster.watch is not None
        watch = place.cluster.watch
        await place.until(lambda: "memcache-pool" in watch.registry.pools)
        pool = watch.registry.pools["memcache-pool"]
        assert (pool.model, pool.endpoint) == ("qwen", "tcp://kvs-master:5557")
        await place.http.delete("/instances/e0")
        await place.until(lambda: ("e0", 0) in place.engines())
    async with running(config_of(nats_server, engines=engines[:1], **section)) as place:
        await place.until(lambda: set(place.engines()) == {("e0", 0)})


async def test_a_pool_without_its_host_is_left_out_and_said_while_engines_work(
    nats_server: ServerProcess, nats_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVS_MASTER_SERVICE", raising=False)
    section = {
        "store_backend": "memcache",
        "model": "qwen",
        "pool_endpoint": "tcp://*:5557",
        "engines": [{"instance_id": "e", "medium_endpoints": {"npu": "tcp://10.0.0.5:5557"}}],
    }
    async with running(config_of(nats_server, **section)) as place:
        await place.until(lambda: set(place.engines()) == {("e", 0)})
        await place.until(lambda: "KVS_MASTER_SERVICE" in str(place.health.notes))
        assert place.health.ready


async def test_the_ports_answer_while_nats_is_still_waited_for(tmp_path: Path) -> None:
    server = make_nats_server(tmp_path)
    port = free_port()
    health = Health("coordinator")
    async with contextlib.AsyncExitStack() as stack:
        starting = asyncio.create_task(
            stack.enter_async_context(coordinator(config_of(server, management_port=port), health))
        )
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            answer = await answer_that_says(http, "/readyz", "waiting for NATS")
            assert answer.status_code == 503
            assert (await http.get("/livez")).status_code == 200
            assert (await http.get("/readiness")).json()["ready"] is False
            for method, path in (("GET", "/instances"), ("POST", "/register"), ("DELETE", "/instances/x")):
                assert (await http.request(method, path, json={})).status_code == 503, path
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(starting, 20)
            assert (await http.get("/readyz")).status_code == 200
    server.stop()


async def answer_that_says(http: httpx.AsyncClient, path: str, text: str) -> httpx.Response:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await http.get(path)
            if text in answer.text:
                return answer
        assert time.monotonic() < deadline, f"{path} never said {text}"
        await asyncio.sleep(0.02)


async def test_the_process_starts_serves_and_stops_cleanly_on_sigterm(
    nats_server: ServerProcess, nats_client: Client
) -> None:
    ports = {name: free_port() for name in ("INFERENCE", "MANAGEMENT", "METRICS")}
    environment = {
        **os.environ,
        "KVROUTE_NATS__URL": nats_server.url,
        "KVROUTE_COORDINATOR__HOST": "127.0.0.1",
        **{f"KVROUTE_COORDINATOR__{name}_PORT": str(port) for name, port in ports.items()},
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.coordinator"), env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await answer_that_says(http, f"http://127.0.0.1:{ports['MANAGEMENT']}/readyz", '"ready":true')
            assert answer.status_code == 200
            for name, path in (("INFERENCE", "/v1/models"), ("METRICS", "/metrics")):
                assert (await http.get(f"http://127.0.0.1:{ports[name]}{path}")).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 10)
        assert process.returncode == 0
        assert b'"event":"stopped"' in log
        assert b"Traceback" not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
