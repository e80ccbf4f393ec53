"""Runs a simulated engine or pool until it is told to stop, registered at a router meanwhile."""

import asyncio
import contextlib
import signal
import sys

import httpx

from kvroute.sim.engine import SimulatedEngine
from kvroute.sim.metaservice import SimulatedMetaService
from kvroute.sim.registration import Registration, register, unregister


def say(text: str) -> None:
    """A progress line for whoever started the simulation."""
    print(text, file=sys.stderr, flush=True)


async def host_engine(engine: SimulatedEngine, router_url: str | None) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError naming a taken port."""
    await engine.start()
    say(f"{engine.settings.name}: serving {engine.settings.model} at {engine.url}")
    for server in engine.ranks:
        say(f"  DP rank {server.dp_rank}: events {engine.endpoint(server.dp_rank)}")
    try:
        await _registered_until_stopped(router_url, engine.registrations())
    finally:
        await engine.stop()


async def host_pool(pool: SimulatedMetaService, instance_id: str, address: str, router_url: str | None) -> None:
    """Serve until SIGTERM or SIGINT; address: the host under which others reach the pool."""
    await pool.start()
    registration = pool.registration(instance_id, address)
    say(f"{instance_id}: MetaService at {pool.url}, events {registration['endpoint']}")
    try:
        await _registered_until_stopped(router_url, [registration])
    finally:
        await pool.stop()


async def _registered_until_stopped(router_url: str | None, bodies: list[Registration]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if router_url is None:
        await stopped.wait()
        return
    registering = asyncio.create_task(register(router_url, bodies, say))
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({registering, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if registering.done():
        await registering
        say(f"registered at {router_url}")
        await waiting
    else:
        registering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await registering
    try:
        await unregister(router_url, bodies)
    except httpx.HTTPError as error:
        say(f"could not unregister at {router_url}: {error}")
