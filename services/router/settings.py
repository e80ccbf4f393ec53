"""Settings of the ``router`` section."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RouterSettings(BaseModel):
    """What the router listens on, accepts and keeps. Times in seconds, sizes in bytes unless named otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("::", description="address of the HTTP server; :: takes IPv4 as well")
    port: int = Field(13333, ge=0, le=65535, description="port of the HTTP server, 0 for any free one")
    workers: int = Field(1, ge=1, le=64, description="processes that answer at the port, each with its own index")
    worker: int = Field(0, ge=0, le=64, description="number of this process, set by the one that starts it")
    index: Literal["auto", "native", "plain"] = Field("auto", description="auto: the compiled core where it is present")
    max_body_bytes: int = Field(64 * 1024 * 1024, ge=1024, description="a larger request body is refused with 413")
    max_tokens: int = Field(4_194_304, ge=1, description="most token ids in one query")
    max_blocks: int = Field(20_000_000, ge=1000, description="most blocks in one space; more are refused and counted")
    max_bytes: int = Field(
        8 * 1024**3, ge=1024**2, description="memory of all indexes; beyond it the oldest blocks are forgotten"
    )
    max_space_bytes: int = Field(4 * 1024**3, ge=1024**2, description="the same for one space")
    max_waiting_blocks: int = Field(262_144, ge=0, description="most blocks of one space that wait for their parent")
    max_spaces: int = Field(1024, ge=1, description="most (model, tenant) pairs that events may open")
    events_timeout: float = Field(5.0, gt=0, description="how long POST /events waits until its events are applied")
    catch_up_timeout: float = Field(120.0, gt=0, description="deadline for catching up with the stream at start")
    stale_after: float = Field(
        30.0, gt=0, description="after which the blocks of a publisher whose stream is stale are not offered"
    )
    snapshot_interval: float = Field(300.0, ge=0, description="how often one replica writes a snapshot, 0 for never")
    snapshot_timeout: float = Field(60.0, gt=0, description="after which a restore is given up and the stream serves")
