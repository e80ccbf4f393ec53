"""``kvroute sim engine|metaservice``: stand-ins for engines and pools, to try and to rehearse without a model."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from kvroute.sim.engine import EngineSettings, SimulatedEngine, own_address
from kvroute.sim.engine_rank import RankSpec
from kvroute.sim.fault_names import describe_faults, parse_fault
from kvroute.sim.hosting import host_engine, host_pool, say
from kvroute.sim.memcache_events import DEFAULT_TENANT, MetaServiceNames
from kvroute.sim.metaservice import SimulatedMetaService
from kvroute.sim.timing import Speed

app = typer.Typer(no_args_is_help=True, help="Simulated engines and pools that speak as the real ones do.")

Model = Annotated[str, typer.Option(help="Served model name.")]
BlockSize = Annotated[int, typer.Option(min=1, max=4096, help="Tokens per block.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
AdvertiseHost = Annotated[str | None, typer.Option(help="Address others use, when not the one above.")]
RouterUrl = Annotated[str | None, typer.Option(help="Router to register at, and to unregister from at the end.")]


@app.command(epilog="Faults: \n\n" + "\n\n".join(describe_faults()))
def engine(
    name: Annotated[str, typer.Option(help="Instance name, unique in the cluster.")] = "sim-engine",
    model: Model = "demo-model",
    block_size: BlockSize = 32,
    npu_blocks: Annotated[int, typer.Option(min=1, help="Device blocks of each DP rank.")] = 512,
    own_cpu_blocks: Annotated[int, typer.Option(min=0, help="Blocks of a CPU tier of its own; not with --pool.")] = 0,
    dp_size: Annotated[int, typer.Option(min=1, max=64, help="DP ranks.")] = 1,
    host: Host = "127.0.0.1",
    advertise_host: AdvertiseHost = None,
    port: Annotated[int, typer.Option(help="HTTP port, 0 for a free one.")] = 8000,
    events_port: Annotated[int, typer.Option(help="Event port of rank 0; rank r adds r; 0 for free ones.")] = 5557,
    replay_port: Annotated[int, typer.Option(help="Replay port of rank 0; rank r adds r; 0 for free ones.")] = 6667,
    pool: Annotated[str | None, typer.Option(help="URL of a simulated MetaService to share blocks through.")] = None,
    pool_cpu_blocks: Annotated[int, typer.Option(min=0, help="DRAM this node lends to the pool, in blocks.")] = 512,
    pool_disk_blocks: Annotated[int, typer.Option(min=0, help="Disk this node lends to the pool, in blocks.")] = 0,
    prefill_rate: Annotated[float, typer.Option(min=1, help="Tokens a DP rank computes per second.")] = 10_000,
    hash_seed: Annotated[str | None, typer.Option(help="PYTHONHASHSEED of the engine; unset: vLLM's default.")] = None,
    router: RouterUrl = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Misbehave, NAME or NAME=VALUE; may be repeated. The list below says how.", metavar="FAULT"),
    ] = None,
) -> None:
    """A vLLM-like engine: OpenAI API, KV events and replay on ZMQ, metrics; answers are letters, caches are real."""
    if pool and own_cpu_blocks:
        raise typer.BadParameter("an engine has either a CPU tier of its own or a pool", param_hint="--own-cpu-blocks")
    if not pool:
        pool_cpu_blocks = pool_disk_blocks = 0
    try:
        faults = tuple(map(parse_fault, fault or ()))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--fault") from None
    settings = EngineSettings(
        name=name,
        model=model,
        rank=RankSpec(block_size, npu_blocks, own_cpu_blocks, hash_seed),
        dp_size=dp_size,
        host=host,
        advertise_host=advertise_host,
        port=port,
        events_port=events_port,
        replay_port=replay_port,
        speed=Speed(prefill=prefill_rate),
        pool_url=pool,
        pool_cpu_blocks=pool_cpu_blocks,
        pool_disk_blocks=pool_disk_blocks,
        faults=faults,
    )

    async def run() -> None:
        await host_engine(SimulatedEngine(settings), router)

    _run(run())


@app.command()
def metaservice(
    name: Annotated[str, typer.Option(help="Name under which the pool is registered.")] = "memcache-pool",
    model: Model = "demo-model",
    block_size: BlockSize = 32,
    tenant: Annotated[str, typer.Option(help="tenant_id in the events.")] = DEFAULT_TENANT,
    hash_as_int: Annotated[bool, typer.Option(help="Send hashes as integers (else as hex text).")] = True,
    host: Host = "127.0.0.1",
    advertise_host: AdvertiseHost = None,
    port: Annotated[int, typer.Option(help="HTTP port for engines, 0 for a free one.")] = 50088,
    events_port: Annotated[int, typer.Option(help="Event port, 0 for a free one.")] = 5557,
    router: RouterUrl = None,
) -> None:
    """A memcache MetaService: engines put blocks over HTTP; its KV events on ZMQ equal the real one's byte for byte."""

    async def run() -> None:
        bind = "*" if host == "0.0.0.0" else host
        pool = SimulatedMetaService(
            MetaServiceNames(model, block_size, tenant, hash_as_int),
            host=host,
            port=port,
            endpoint=f"tcp://{bind}:{events_port}",
        )
        await host_pool(pool, name, advertise_host or own_address(host), router)

    _run(run())


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        say(f"kvroute sim: {reason}{'; port 0 takes a free one' if 'already in use' in reason else ''}")
        raise typer.Exit(1) from None
