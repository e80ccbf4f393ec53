"""Settings of the ``coordinator`` section."""

from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from schemas.addresses import AddressError, parse_tcp
from schemas.registration import (
    REGISTRATION_FIELDS,
    RegistrationError,
    canonical_backend,
    canonical_engine_type,
    parse_registration,
)
from schemas.registry import MAX_BLOCK_SIZE, StoreBackend
from services.coordinator.frontdoor.settings import FrontDoorSettings
from services.coordinator.liveness.settings import LivenessSettings
from services.coordinator.store_metrics.settings import StoreMetricsSettings

MAX_STATIC = 4096


class CoordinatorSettings(BaseModel):
    """What the coordinator listens on, and what it takes for granted about engines and pools.

    ``block_size`` ... ``replay_endpoint`` fill in what a static registration or a controller's message leaves out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field("::", description="address of the HTTP servers")
    inference_port: int = Field(1025, ge=0, le=65535, description="port of the OpenAI API, 0 for any free one")
    management_port: int = Field(1026, ge=0, le=65535, description="port of registration and health")
    metrics_port: int = Field(1027, ge=0, le=65535, description="port of /metrics")

    model: str | None = Field(
        None,
        validation_alias=AliasChoices("model", "model_path"),
        description="model name of the pool, and of controller messages that name none",
    )
    block_size: int = Field(128, ge=1, le=MAX_BLOCK_SIZE, description="tokens per block of the engines")
    engine_type: str = Field("vLLM", min_length=1)
    store_backend: str = Field(StoreBackend.MOONCAKE, description="Mooncake, Memcache, YuanRong or None")
    pool_endpoint: str | None = Field(
        None, description="the pool's event publisher; tcp://*:5557 means the host in KVS_MASTER_SERVICE"
    )
    npu_endpoint: str = Field(
        "tcp://*:5557",
        validation_alias=AliasChoices("npu_endpoint", "xpu_endpoint"),
        description="event port of rank 0 of an engine that a controller announces; rank r uses port + r",
    )
    cpu_endpoint: str | None = Field(None, description="the same for a node's pool worker, without the rank")
    disk_endpoint: str | None = Field(None, description="the same for a node's pool worker, without the rank")
    replay_endpoint: str | None = Field(None, description="replay port of rank 0, for example tcp://*:6667")

    engines: tuple[dict[str, Any], ...] = Field((), description="registrations kept by this file, as in POST /register")
    pools: tuple[dict[str, Any], ...] = Field((), description="the same for pools")
    keep_interval: float = Field(5.0, gt=0, description="seconds between two looks at whether they are still there")

    store_metrics: StoreMetricsSettings = Field(default_factory=StoreMetricsSettings)
    front_door: FrontDoorSettings = Field(default_factory=FrontDoorSettings)
    liveness: LivenessSettings = Field(default_factory=LivenessSettings)

    @field_validator("store_backend")
    @classmethod
    def _backend(cls, value: str) -> str:
        backend = canonical_backend(value or StoreBackend.MOONCAKE)
        if backend is None:
            raise ValueError(f"{value!r} is unknown; write one of {', '.join(StoreBackend.ALL)}")
        return backend

    @field_validator("engine_type")
    @classmethod
    def _engine_type(cls, value: str) -> str:
        return canonical_engine_type(value)

    @field_validator("model", "pool_endpoint", "cpu_endpoint", "disk_endpoint", "replay_endpoint")
    @classmethod
    def _empty_is_unset(cls, value: str | None) -> str | None:
        return value.strip() or None if value is not None else None

    @field_validator("npu_endpoint", "cpu_endpoint", "disk_endpoint", "replay_endpoint")
    @classmethod
    def _wildcard(cls, value: str | None) -> str | None:
        if not value:
            return None if value is None else "tcp://*:5557"
        try:
            place = parse_tcp(value)
        except AddressError as error:
            raise ValueError(f"{error}; {error.fix}") from None
        if not place.wildcard:
            raise ValueError(f"{value!r} names one host, but stands for every engine; write tcp://*:{place.port}")
        return place.url()

    @field_validator("pool_endpoint")
    @classmethod
    def _pool_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            return parse_tcp(value).url()
        except AddressError as error:
            raise ValueError(f"{error}; {error.fix}") from None

    @model_validator(mode="after")
    def _static_registrations_are_sound(self) -> Self:
        problems: list[str] = []
        for key, entries in (("engines", self.engines), ("pools", self.pools)):
            if len(entries) > MAX_STATIC:
                raise ValueError(f"{key}: {len(entries)} entries are too many, at most {MAX_STATIC}")
            seen: set[tuple[str, int]] = set()
            for position, body in enumerate(self.static_bodies(key)):
                place = f"{key}.{position}"
                problems.extend(f"{place}: unknown key {name}" for name in sorted(set(body) - REGISTRATION_FIELDS))
                try:
                    record = parse_registration(body, "kvs-master").record
                except RegistrationError as error:
                    problems.extend(f"{place}.{problem}" for problem in error.problems)
                    continue
                if (record.instance_id, record.dp_rank) in seen:
                    problems.append(f"{place}: {record.instance_id} rank {record.dp_rank} is listed twice")
                seen.add((record.instance_id, record.dp_rank))
        if self.pool_endpoint and self.store_backend not in (StoreBackend.MOONCAKE, StoreBackend.MEMCACHE):
            problems.append(f"pool_endpoint: {self.store_backend} has no pool publisher; set store_backend")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def static_bodies(self, key: str) -> list[dict[str, Any]]:
        """The registrations under ``engines`` or ``pools`` with the section's defaults filled in."""
        defaults: dict[str, Any] = {
            "type": self.engine_type,
            "block_size": self.block_size,
            "dp_rank": 0,
            "store_backend": self.store_backend,
            "kind": key.removesuffix("s"),
        }
        if self.model:
            defaults["modelname"] = self.model
        entries = self.engines if key == "engines" else self.pools
        return [{**defaults, **_spelt_out(entry)} for entry in entries]

    def pool_body(self, model: str) -> dict[str, Any] | None:
        """The registration of ``pool_endpoint`` for a model, None when there is none."""
        if self.pool_endpoint is None:
            return None
        return {
            "instance_id": f"{self.store_backend.lower()}-pool",
            "type": self.engine_type,
            "modelname": model,
            "block_size": self.block_size,
            "dp_rank": 0,
            "store_backend": self.store_backend,
            "endpoint": self.pool_endpoint,
            "kind": "pool",
        }


def _spelt_out(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with ``model`` under the name that the registration API prefers, so that it wins over the default."""
    named = dict(entry)
    if "model" in named and "modelname" not in named:
        named["modelname"] = named.pop("model")
    return named
