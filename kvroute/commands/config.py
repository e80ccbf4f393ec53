"""``kvroute config engine|pool``: the configuration lines for a given setup, validated."""

from typing import Annotated

import typer

from kvroute.cluster_config.engine import EngineSetup, SetupError, engine_lines
from kvroute.cluster_config.pool import PoolSetup, pool_lines

app = typer.Typer(no_args_is_help=True, help="Print the lines that engines and pools need so that events arrive.")

Router = Annotated[str, typer.Option(help="Base URL of kvroute's router.")]


def _fail(error: SetupError) -> typer.Exit:
    option = "--" + error.field.replace("_", "-")
    typer.echo(f"kvroute config: {option} {str(error).partition(': ')[2]}", err=True)
    return typer.Exit(2)


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="Served model name.")],
    instance_id: Annotated[str, typer.Option(help="Name of the instance, unique in the cluster.")],
    host: Annotated[str, typer.Option(help="Address under which kvroute reaches the engine (its Pod IP).")],
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 128,
    dp_size: Annotated[int, typer.Option(help="DP ranks that this host serves.")] = 1,
    first_rank: Annotated[int, typer.Option(help="Lowest DP rank on this host.")] = 0,
    event_port: Annotated[int, typer.Option(help="Event port of rank 0; rank r adds r.")] = 5557,
    replay_port: Annotated[int, typer.Option(help="Replay port of rank 0; rank r adds r.")] = 6667,
    topic: Annotated[str, typer.Option(help="ZMQ topic of the events.")] = "kv-events",
    store_backend: Annotated[str, typer.Option(help="Pool behind the engine: Memcache, Mooncake, YuanRong, None.")] = (
        "Memcache"
    ),
    hash_seed: Annotated[str, typer.Option(help="PYTHONHASHSEED, equal on all engines that share a pool.")] = "0",
    router: Router = "http://127.0.0.1:13333",
) -> None:
    """Lines for a vLLM engine: environment, --kv-events-config, registration of every DP rank."""
    setup = EngineSetup(
        model=model,
        instance_id=instance_id,
        host=host,
        block_size=block_size,
        dp_size=dp_size,
        first_rank=first_rank,
        event_port=event_port,
        replay_port=replay_port,
        topic=topic,
        store_backend=store_backend,
        hash_seed=hash_seed,
    )
    try:
        typer.echo(engine_lines(setup, router))
    except SetupError as error:
        raise _fail(error) from None


@app.command()
def pool(
    backend: Annotated[str, typer.Option(help="memcache or mooncake.")],
    model: Annotated[str, typer.Option(help="The engines' served model name.")],
    host: Annotated[str, typer.Option(help="Address of the pool's master (a Service name will do).")],
    block_size: Annotated[int, typer.Option(help="The engines' --block-size.")] = 128,
    event_port: Annotated[int, typer.Option(help="Port of the pool's events.")] = 5557,
    metrics_port: Annotated[int, typer.Option(help="Port of the pool's /metrics.")] = 50090,
    tenant: Annotated[str, typer.Option(help="Tenant of the blocks.")] = "default",
    router: Router = "http://127.0.0.1:13333",
) -> None:
    """Lines for a memory pool: event publisher, owner names, metrics, registration."""
    setup = PoolSetup(
        backend=backend,
        model=model,
        host=host,
        block_size=block_size,
        event_port=event_port,
        metrics_port=metrics_port,
        tenant=tenant,
    )
    try:
        typer.echo(pool_lines(setup, router))
    except SetupError as error:
        raise _fail(error) from None
