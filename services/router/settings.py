"""Settings of the ``router`` section."""

from pydantic import BaseModel, ConfigDict, Field


class RouterSettings(BaseModel):
    """What the router listens on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("::", description="address of the HTTP server")
    port: int = Field(13333, ge=0, le=65535, description="port of the HTTP server, 0 for any free one")
