"""The real memcache MetaService as a peer: its event arrives, is decoded, and touches nothing it must not touch."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq.asyncio

from kvroute.sim.vllm_events import BlockStored
from tests.conftest import free_port, is_listening, wait_for
from tests.e2e.support import DEADLINE_SECONDS, Counts, EngineStub, Pipeline, Router, eventually, unique
from tests.real_pools import MEMCACHE, environment_with

pytestmark = [pytest.mark.real_pool, pytest.mark.timeout(240)]

MODEL, BLOCK_SIZE = "memcache-real", 16

META_SERVICE = """\
import sys
from memcache_hybrid import MetaConfig, MetaService
config = MetaConfig()
config.meta_service_url, config.config_store_url, config.metrics_url, config.kv_events_endpoint = sys.argv[1:5]
config.kv_events_enable = True
config.kv_events_model_name, config.kv_events_block_size = sys.argv[5], int(sys.argv[6])
config.kv_events_tenant_id = "default"
config.log_output_target = "screen"
MetaService.setup(config)
MetaService.main()
"""

# A LocalService without an Ascend driver joins, fails its device check and leaves: the MetaService tells that.
LOCAL_SERVICE = """\
import sys
from memcache_hybrid import DistributedObjectStore, LocalConfig
config = LocalConfig()
config.meta_service_url, config.config_store_url = sys.argv[1:3]
config.protocol, config.dram_size, config.backend_id, config.world_size = "device_rdma", "64MB", "127.0.0.1", 8
store = DistributedObjectStore()
store.setup(config)
store.init(0)
"""


class MetaService:
    """A running MetaService and the addresses it listens on."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self.ports = [free_port() for _ in range(4)]
        meta, store, metrics, events = self.ports
        self.urls = [f"tcp://127.0.0.1:{meta}", f"tcp://127.0.0.1:{store}"]
        self.endpoint = f"tcp://127.0.0.1:{events}"
        arguments = [*self.urls, f"http://127.0.0.1:{metrics}", self.endpoint, MODEL, str(BLOCK_SIZE)]
        self._process = self._run(META_SERVICE, *arguments)
        wait_for(lambda: all(map(is_listening, self.ports)), "memcache MetaService", 30)

    def lose_a_local_service(self) -> None:
        self._run(LOCAL_SERVICE, *self.urls).wait(timeout=60)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)

    def _run(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [str(self._python), "-c", program, *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def meta_service() -> Iterator[MetaService]:
    service = MetaService(environment_with(*MEMCACHE) / "bin" / "python")
    yield service
    service.stop()


@pytest.fixture
async def engine() -> AsyncIterator[EngineStub]:
    context = zmq.asyncio.Context()
    engine = EngineStub(context)
    yield engine
    await engine.publisher.close()
    context.destroy(linger=0)


async def test_a_lost_local_service_is_heard_and_clears_nothing_that_it_does_not_name(
    meta_service: MetaService, engine: EngineStub, router: Router, pipeline: Pipeline
) -> None:
    """The real event names the medium disk and an empty backend_id: it is about no node, and nothing of one goes."""
    instance, pool = unique("engine"), unique("memcache-pool")
    await router.register_engine(MODEL, instance, engine.publisher, BLOCK_SIZE)
    tokens = list(range(BLOCK_SIZE))
    engine.publish(
        BlockStored(
            block_hashes=[1],
            parent_block_hash=None,
            token_ids=tokens,
            block_size=BLOCK_SIZE,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
    )
    await router.register_pool_at(MODEL, pool, meta_service.endpoint, BLOCK_SIZE)

    async def connected() -> bool:
        return bool((await pipeline.publisher(meta_service.endpoint))["connected"])

    await eventually(connected, True)
    await asyncio.to_thread(meta_service.lose_a_local_service)

    async def heard() -> tuple[int, dict[str, int], dict[str, int]]:
        events = (await pipeline.publisher(meta_service.endpoint))["events"]
        return events["received"], events["rejected"], events["dropped"]

    await eventually(heard, (1, {}, {}), DEADLINE_SECONDS)
    assert await router.counts(MODEL, BLOCK_SIZE, tokens, instance) == Counts(npu=1, matched=BLOCK_SIZE)
