"""Registrations: what the KV bucket ``kv_registry`` holds, one record per engine DP rank and one per pool.

Records are JSON. They are already normalised (schemas.registration turns a request into a record): endpoints are
connect targets, backend names have their canonical spelling, ``generation`` is set.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from schemas.blocks import Tier

DEFAULT_TENANT = "default"
MAX_BLOCK_SIZE = 4096
MAX_DP_RANK = 65_535
MAX_NAME = 512

RegistrationDialect = Literal["conductor", "mooncake"]
Origin = Literal["api", "config", "controller"]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class StoreBackend:
    """Canonical spellings of the memory pools (facts: names are case-insensitive)."""

    MOONCAKE = "Mooncake"
    MEMCACHE = "Memcache"
    YUANRONG = "YuanRong"
    NONE = "None"

    ALL = (MOONCAKE, MEMCACHE, YUANRONG, NONE)


class _Record(BaseModel):
    """registered_with: whose registration API the caller speaks, so that it gets the answers it knows.

    origin: who keeps the registration: a caller of the API, the configuration file, a cluster controller.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: Name
    model: Name
    tenant: Name = DEFAULT_TENANT
    block_size: int = Field(ge=1, le=MAX_BLOCK_SIZE)
    dp_rank: int = Field(0, ge=0, le=MAX_DP_RANK)
    engine_type: str = "vLLM"
    store_backend: str = StoreBackend.MOONCAKE
    generation: int = Field(0, ge=0)
    registered_with: RegistrationDialect = "conductor"
    origin: Origin = "api"


class EngineRecord(_Record):
    """One DP rank of an engine instance.

    endpoints: ZMQ PUB to connect to, by tier (most engines have only ``npu``; YuanRong nodes add ``cpu`` / ``disk``).
    own_tiers: tiers whose events are proof by themselves (an engine's own CPU tier, no pool behind it).
    backend_ids: pool locations that are local to this instance (its host, its node).
    url: HTTP base of the engine, when known. counted: see docs/adr/0006. paused: take no new requests; blocks stay.
    """

    kind: Literal["engine"] = "engine"
    endpoints: dict[Tier, str] = Field(default_factory=dict)
    replay_endpoint: str | None = None
    own_tiers: tuple[Tier, ...] = ()
    backend_ids: tuple[str, ...] = ()
    url: str | None = None
    lora_name: str | None = None
    additional_salt: str | None = None
    node_id: str | None = None
    role: str | None = None
    counted: bool = True
    paused: bool = False


class PoolRecord(_Record):
    """A memory pool's event publisher (memcache MetaService, Mooncake master, a YuanRong node)."""

    kind: Literal["pool"] = "pool"
    endpoint: str


class RetiredRecord(BaseModel):
    """Left behind by an unregistration: events of generations up to this one are discarded everywhere."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["retired"] = "retired"
    retired_kind: Literal["engine", "pool"]
    instance_id: Name
    dp_rank: int = Field(0, ge=0, le=MAX_DP_RANK)
    model: Name
    tenant: Name = DEFAULT_TENANT
    generation: int = Field(ge=0)


Record = Annotated[EngineRecord | PoolRecord | RetiredRecord, Field(discriminator="kind")]

_adapter: TypeAdapter[EngineRecord | PoolRecord | RetiredRecord] = TypeAdapter(Record)


def dump_record(record: EngineRecord | PoolRecord | RetiredRecord) -> bytes:
    """The JSON form of a record."""
    return _adapter.dump_json(record)


def load_record(body: bytes) -> EngineRecord | PoolRecord | RetiredRecord:
    """Read a record. Raises pydantic.ValidationError naming the field."""
    return _adapter.validate_json(body)
