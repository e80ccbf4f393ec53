"""Settings of ``coordinator.store_metrics``."""

from pydantic import BaseModel, ConfigDict, Field, field_validator

from schemas.addresses import AddressError, canonical_host, parse_http


class StoreMetricsSettings(BaseModel):
    """Where the store's metrics are and how they are collected. Times in seconds.

    The endpoint is chosen in this order: ``url``; ``port`` with the service; the environment (KV_STORE_METRICS_URL,
    KV_STORE_METRICS_PORT with KVS_MASTER_SERVICE); port 50090 with the service. The service is ``service``, else
    KVS_MASTER_SERVICE.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    enabled: bool | None = Field(
        None, description="false: off whatever else is set; unset: on as soon as an endpoint is known"
    )
    backend: str | None = Field(None, description="Memcache or Mooncake; unset: told by the metrics themselves")
    url: str | None = Field(None, description="full URL of the store's metrics page, wins over everything")
    service: str | None = Field(None, description="host of the store, instead of KVS_MASTER_SERVICE")
    port: int | None = Field(None, ge=1, le=65535, description="port of the metrics page, instead of 50090")
    interval: float = Field(3.0, ge=0.1, description="pause between two collections")
    timeout: float = Field(2.0, gt=0, le=60, description="a collection that takes longer has failed")
    drop_after: float = Field(30.0, gt=0, description="values are dropped when no collection succeeded for so long")
    max_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="a larger metrics page is refused")
    max_samples: int = Field(5000, ge=1, description="samples passed through at most; more are counted")

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, value: str | None) -> str | None:
        if value is None or not value.strip():
            return None
        known = {"memcache": "Memcache", "mooncake": "Mooncake"}
        if value.strip().lower() not in known:
            raise ValueError(f"{value!r} has no store metrics; write Memcache or Mooncake, or leave it out")
        return known[value.strip().lower()]

    @field_validator("url")
    @classmethod
    def _usable_url(cls, value: str | None) -> str | None:
        if value is None or not value.strip():
            return None
        try:
            return parse_http(value)
        except AddressError as error:
            raise ValueError(f"{error}; {error.fix}") from None

    @field_validator("service")
    @classmethod
    def _usable_service(cls, value: str | None) -> str | None:
        if value is None or not value.strip():
            return None
        try:
            host = canonical_host(value)
        except AddressError as error:
            raise ValueError(f"{error}; {error.fix}") from None
        if host == "*":
            raise ValueError(f"{value!r} is an address to listen on; give the store's host")
        return host
