"""The demo's own cluster: three simulated engines of two DP ranks, a memcache pool, a decode node lending memory."""

import contextlib
import sys
from collections.abc import AsyncIterator

from kvroute.demo.cluster import Cluster
from kvroute.sim.engine import EngineSettings, SimulatedEngine
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.memcache_events import MetaServiceNames
from kvroute.sim.metaservice import SimulatedMetaService
from kvroute.sim.pool_client import PoolClient
from kvroute.sim.registration import register
from kvroute.sim.timing import Speed

MODEL = "demo-model"
BLOCK_SIZE = 32
ENGINES = ("engine-1", "engine-2", "engine-3")
DP_SIZE = 2
POOL = "memcache-pool"
NPU_BLOCKS = 250
POOL_CPU_BLOCKS = 40
POOL_DISK_BLOCKS = 30
DECODE_NODE_BLOCKS = 40
SPEED = Speed(prefill=2_800.0)
SEVERAL_LOOPBACK_ADDRESSES = sys.platform == "linux"


@contextlib.asynccontextmanager
async def simulated_cluster(router_url: str) -> AsyncIterator[Cluster]:
    """Start and register everything; stop and forget it at the end. Raises OSError, ValueError (refused)."""
    async with contextlib.AsyncExitStack() as stack:
        pool = SimulatedMetaService(MetaServiceNames(MODEL, BLOCK_SIZE))
        await pool.start()
        stack.push_async_callback(pool.stop)
        engines = [SimulatedEngine(_settings(number, name, pool.url)) for number, name in enumerate(ENGINES)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        decode_node = PoolClient(pool.url, _address(len(ENGINES)), DECODE_NODE_BLOCKS)
        stack.push_async_callback(decode_node.close)
        await decode_node.attach()
        bodies = [body for engine in engines for body in engine.registrations()]
        await register(router_url, [*bodies, pool.registration(POOL)], lambda _: None)
        yield Cluster(
            router_url=router_url,
            engines={engine.settings.name: engine.url for engine in engines},
            dp_size=DP_SIZE,
            model=MODEL,
            block_size=BLOCK_SIZE,
            pool_url=pool.url,
        )


def _settings(number: int, name: str, pool_url: str) -> EngineSettings:
    return EngineSettings(
        name=name,
        model=MODEL,
        rank=RankSpec(BLOCK_SIZE, NPU_BLOCKS),
        dp_size=DP_SIZE,
        host=_address(number),
        speed=SPEED,
        pool_url=pool_url,
        pool_cpu_blocks=POOL_CPU_BLOCKS,
        pool_disk_blocks=POOL_DISK_BLOCKS,
    )


def _address(number: int) -> str:
    """A node's address. Where loopback has one address only, all nodes are one and every pool block is local."""
    return f"127.0.0.{11 + number}" if SEVERAL_LOOPBACK_ADDRESSES else "127.0.0.1"
