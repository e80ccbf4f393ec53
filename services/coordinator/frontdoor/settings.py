"""Settings of ``coordinator.front_door``."""

from pydantic import BaseModel, ConfigDict, Field, field_validator

from schemas.addresses import AddressError, parse_http


class FrontDoorSettings(BaseModel):
    """Whom the front door asks and how long it waits. Times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    router_url: str = Field("http://127.0.0.1:13333", description="base URL of the router")
    query_timeout: float = Field(0.5, gt=0, description="a router that answers later is not waited for")
    tokenize_timeout: float = Field(2.0, gt=0, description="the same for an engine's /tokenize")
    connect_timeout: float = Field(5.0, gt=0)
    first_byte_timeout: float = Field(600.0, gt=0, description="how long an engine may take to begin its answer")
    attempts: int = Field(3, ge=1, le=10, description="engines tried before a request fails")
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    tokens_per_request: int = Field(512, ge=0, description="cached tokens that one running request outweighs")

    @field_validator("router_url")
    @classmethod
    def _url(cls, value: str) -> str:
        try:
            return parse_http(value)
        except AddressError as error:
            raise ValueError(f"{error}; {error.fix}") from None
