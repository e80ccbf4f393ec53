"""Settings that every service shares: NATS, Redis, logging, shutdown."""

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

HOUR = 3600.0
NATS_SCHEMES = ("nats", "tls", "ws", "wss")
REDIS_SCHEMES = ("redis", "rediss")


def names_a_server(url: str, schemes: tuple[str, ...]) -> bool:
    """Whether a URL has one of these schemes, a host, and a port that can be connected to."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NatsSettings(_Section):
    """Where NATS is and how much its streams keep. Times in seconds, sizes in bytes."""

    url: str = Field("nats://127.0.0.1:4222", repr=False, description="server URL, several separated by commas")
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    credentials_file: str | None = Field(None, description="path of a .creds file")
    tls_ca_file: str | None = Field(None, description="CA certificate for TLS connections")
    connect_timeout: float = Field(2.0, gt=0)
    replicas: int = Field(1, ge=1, le=5, description="copies of each stream in a NATS cluster")
    storage: Literal["file", "memory"] = "file"
    stream_max_age: float = Field(24 * HOUR, gt=0, description="how long events are kept")
    stream_max_bytes: int = Field(2 * 1024**3, ge=1024**2, description="how much each stream keeps")
    duplicate_window: float = Field(120.0, gt=0, description="how long Nats-Msg-Ids are remembered")
    stream_state_ttl: float = Field(
        15.0, ge=1, description="a publisher's state that ingest did not repeat for so long is forgotten: it is stale"
    )

    @field_validator("url")
    @classmethod
    def _names_servers(cls, value: str) -> str:
        servers = [url.strip() for url in value.split(",") if url.strip()]
        if not servers:
            raise ValueError("is empty; write nats://host:4222, several separated by commas")
        if not all(names_a_server(url if "://" in url else f"nats://{url}", NATS_SCHEMES) for url in servers):
            # The URL itself is not repeated: there may be a password in it.
            raise ValueError("is not a NATS server; write nats://host:4222, several separated by commas")
        return value

    def servers(self) -> list[str]:
        """The server URLs one by one."""
        return [url.strip() for url in self.url.split(",") if url.strip()]


class RedisSettings(_Section):
    """Where Redis is (the matcher's waiting state). Commands of Redis 6.2 suffice; Valkey works as well."""

    mode: Literal["single", "sentinel", "cluster"] = "single"
    url: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="single and cluster: redis:// or rediss://"
    )
    sentinels: tuple[str, ...] = Field((), description="sentinel: host:port of each sentinel")
    sentinel_service: str = Field("mymaster", description="sentinel: name of the watched master")
    password: SecretStr | None = None
    timeout: float = Field(2.0, gt=0, description="seconds until a command counts as failed")

    @field_validator("url")
    @classmethod
    def _names_a_server(cls, value: SecretStr) -> SecretStr:
        if not names_a_server(value.get_secret_value(), REDIS_SCHEMES):
            raise ValueError("is not a Redis server; write redis://host:6379/0, or rediss:// for TLS")
        return value

    @field_validator("sentinels")
    @classmethod
    def _have_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            host, _, port = text.rpartition(":")
            if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
                raise ValueError(f"has {text[:80]!r}; write host:port, for example redis-0:26379")
        return value

    @model_validator(mode="after")
    def _has_sentinels(self) -> Self:
        if self.mode == "sentinel" and not self.sentinels:
            raise ValueError("mode is sentinel but sentinels is empty; give host:port of each sentinel")
        return self


class LoggingSettings(_Section):
    """What is logged and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    kv_events: Literal["debug", "info", "warning", "off"] = Field(
        "info", description="level of the kv_event lines; debug shows every state"
    )
    format: Literal["auto", "json", "console"] = Field("auto", description="auto: console on a terminal, else JSON")


class RuntimeSettings(_Section):
    """What every process does the same way."""

    shutdown_grace: float = Field(10.0, gt=0, description="seconds a service takes at most to stop")
    taps_per_second: int = Field(2000, ge=0, description="state notes published at most; more are skipped and counted")
