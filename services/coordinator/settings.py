"""Settings of the ``coordinator`` section."""

from pydantic import BaseModel, ConfigDict, Field


class CoordinatorSettings(BaseModel):
    """What the coordinator listens on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("::", description="address of the HTTP server")
    port: int = Field(1026, ge=0, le=65535, description="port of the HTTP server, 0 for any free one")
