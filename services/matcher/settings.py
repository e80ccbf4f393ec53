"""Settings of the ``matcher`` section."""

from pydantic import BaseModel, ConfigDict, Field


class MatcherSettings(BaseModel):
    """What the matcher remembers and for how long. Times in seconds unless the name says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("::", description="address of the HTTP server (health, metrics, AsyncAPI)")
    port: int = Field(13332, ge=0, le=65535, description="port of the HTTP server, 0 for any free one")
    key_prefix: str = Field("kvroute", min_length=1, max_length=64, description="first word of every Redis key")

    pending_ttl: float = Field(60.0, gt=0, description="how long a pool event waits for its content")
    content_ttl: float = Field(300.0, gt=0, description="how long content from NPU events is remembered after last use")
    offload_ttl: float = Field(600.0, gt=0, description="how long content from offload events is remembered")
    max_pending: int = Field(1_000_000, ge=1, description="blocks of one space that wait at most; the oldest go first")
    max_content: int = Field(4_000_000, ge=4, description="blocks of one space whose content is remembered at most")
    sweep_interval: float = Field(1.0, gt=0, description="how often expired waiting entries are collected")

    batch_size: int = Field(256, ge=1, le=4096, description="messages handled together at most")
    lease_ttl: float = Field(5.0, gt=0.2, description="how soon another replica takes over when this one is gone")
