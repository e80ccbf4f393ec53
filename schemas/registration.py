"""From a registration request to a registry record (pure).

Two spellings of ``POST /register`` are understood: the conductor's (``medium_endpoints``, ``store_backend``) and
Mooncake's (``endpoint``, ``type``, ``additionalsalt``). What a body registers is decided in this order:

1. ``kind`` says ``engine`` or ``pool`` (an extension): that.
2. ``medium_endpoints`` is not empty: an engine; ``endpoint`` is ignored.
3. ``endpoint`` with ``store_backend`` Mooncake or Memcache: a pool.
4. ``endpoint`` without ``store_backend``: Mooncake's spelling; ``type`` Mooncake is a pool, every other type an engine.
5. Everything else: an engine (with ``endpoint`` as its npu publisher, or without any: events come over HTTP).

Every problem of a body is reported at once, as (field, problem, fix).
"""

from dataclasses import dataclass
from typing import Literal

from schemas.addresses import AddressError, TcpEndpoint, canonical_host
from schemas.registration_engine import canonical_backend_id, read_engine
from schemas.registration_fields import CommonFields, FieldProblem, Fields, RegistrationError
from schemas.registry import (
    DEFAULT_TENANT,
    MAX_BLOCK_SIZE,
    MAX_DP_RANK,
    EngineRecord,
    PoolRecord,
    RegistrationDialect,
    StoreBackend,
)

__all__ = [
    "REGISTRATION_FIELDS",
    "FieldProblem",
    "Registration",
    "RegistrationError",
    "Unregistration",
    "canonical_backend",
    "canonical_backend_id",
    "canonical_engine_type",
    "parse_registration",
    "parse_unregistration",
]

MAX_GENERATION = 2**63 - 1
POOL_BACKENDS = (StoreBackend.MOONCAKE, StoreBackend.MEMCACHE)
ENGINE_TYPES = ("vLLM", "SGLang", "Mooncake", "TensorRT-LLM", "MindIE")

REGISTRATION_FIELDS = frozenset(
    (
        "instance_id", "type", "modelname", "model", "block_size", "dp_rank", "dp_size", "medium_endpoints", "endpoint",
        "store_backend", "replay_endpoint", "tenant_id", "node_id", "lora_name", "additionalsalt", "additional_salt",
        "kind", "host", "port", "url", "role", "own_tiers", "offload", "backend_ids", "counted",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Registration:
    """A record (generation 0, the registrar gives it one) and what the caller should know about it."""

    record: EngineRecord | PoolRecord
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unregistration:
    """Which registration is to go. model / tenant: what the request named, empty when it did not.

    generation: only if it is of this life or an earlier one, 0: whichever stands.
    """

    instance_id: str
    dp_rank: int
    model: str = ""
    tenant: str = ""
    generation: int = 0


def parse_registration(body: object, pool_service: str | None = None) -> Registration:
    """Read a ``POST /register`` body.

    pool_service: host that a pool's ``tcp://*:port`` stands for (KVS_MASTER_SERVICE). Raises RegistrationError.
    """
    fields = Fields(body)
    common = _common(fields)
    kind = _kind(fields, common)
    dialect = _dialect(fields, common.backend_given)
    if kind == "pool":
        record: EngineRecord | PoolRecord | None = _pool(fields, common, dialect, pool_service)
    else:
        record = read_engine(fields, common, dialect)
    fields.finish()
    if record is None:  # pragma: no cover - finish() raised
        raise AssertionError("a record is missing without a problem")
    return Registration(record, tuple(fields.warnings))


def parse_unregistration(body: object) -> Unregistration:
    """Read a ``POST /unregister`` body; only ``instance_id`` and ``dp_rank`` are needed. Raises RegistrationError."""
    fields = Fields(body)
    instance_id = fields.name("instance_id", required=True)
    dp_rank = fields.integer("dp_rank", 0, MAX_DP_RANK)
    model = fields.name("modelname", "model")
    tenant = fields.name("tenant_id")
    generation = fields.integer("generation", 1, MAX_GENERATION) if fields.body.get("generation") is not None else 0
    fields.finish()
    return Unregistration(instance_id, dp_rank, model, tenant, generation)


def canonical_backend(name: str) -> str | None:
    """The canonical spelling of a pool's name, None for an unknown one."""
    return next((known for known in StoreBackend.ALL if known.lower() == name.strip().lower()), None)


def canonical_engine_type(name: str) -> str:
    """The canonical spelling of a known engine; an unknown one stays as it is."""
    text = name.strip()
    return next((known for known in ENGINE_TYPES if known.lower() == text.lower()), text)


def _common(fields: Fields) -> CommonFields:
    instance_id = fields.name("instance_id", required=True)
    engine_type = fields.name("type", required=True)
    model = fields.name("modelname", "model", required=True)
    block_size = fields.integer("block_size", 1, MAX_BLOCK_SIZE)
    dp_rank = fields.integer("dp_rank", 0, MAX_DP_RANK)
    tenant = fields.name("tenant_id") or DEFAULT_TENANT
    if fields.body.get("dp_size") not in (None, 1):
        fields.refuse("dp_size", "a registration is one DP rank", "register each rank with its own dp_rank")
    given = fields.name("store_backend")
    backend = canonical_backend(given) if given else StoreBackend.MOONCAKE
    if backend is None:
        backend = StoreBackend.YUANRONG
        fields.warnings.append(f"store_backend {given!r} is unknown and handled as {backend}")
    if unknown := sorted(str(name)[:40] for name in fields.body if name not in REGISTRATION_FIELDS)[:10]:
        fields.warnings.append(f"unknown fields are ignored: {', '.join(unknown)}")
    return CommonFields(
        instance_id, model, tenant, block_size, dp_rank, canonical_engine_type(engine_type), backend, bool(given)
    )


def _kind(fields: Fields, common: CommonFields) -> Literal["engine", "pool"]:
    kind = fields.text("kind").lower()
    if kind == "engine":
        return "engine"
    if kind == "pool":
        return "pool"
    if kind:
        fields.refuse("kind", f"{kind[:40]!r} is not known", "write engine or pool, or leave it out")
    if fields.body.get("medium_endpoints") or not fields.body.get("endpoint"):
        return "engine"
    if common.backend_given:
        return "pool" if common.backend in POOL_BACKENDS else "engine"
    return "pool" if common.engine_type == StoreBackend.MOONCAKE else "engine"


def _dialect(fields: Fields, backend_given: bool) -> RegistrationDialect:
    """Whose answers the caller expects: Mooncake's API knows neither store_backend nor medium_endpoints."""
    mooncake = not backend_given and "medium_endpoints" not in fields.body and bool(fields.body.get("endpoint"))
    return "mooncake" if mooncake else "conductor"


def _pool(
    fields: Fields, common: CommonFields, dialect: RegistrationDialect, pool_service: str | None
) -> PoolRecord | None:
    url = fields.body.get("endpoint")
    if not url:
        fields.refuse("endpoint", "is missing", "a pool is registered with its publisher, tcp://host:port")
        return None
    endpoint = fields.tcp("endpoint", url)
    host = fields.host("host")
    if endpoint is None:
        return None
    if endpoint.wildcard:
        host = host or _service_host(fields, pool_service)
        if host is None:
            fields.refuse(
                "endpoint",
                f"{url!r} is an address to listen on and KVS_MASTER_SERVICE is not set",
                "name the pool's host, or set KVS_MASTER_SERVICE to it",
            )
            return None
        endpoint = TcpEndpoint(host, endpoint.port)
    if fields.problems:
        return None
    return PoolRecord(**common.values(dialect), endpoint=endpoint.url())


def _service_host(fields: Fields, pool_service: str | None) -> str | None:
    if not pool_service or not pool_service.strip():
        return None
    try:
        host = canonical_host(pool_service)
    except AddressError as error:
        fields.refuse("endpoint", f"KVS_MASTER_SERVICE: {error}", error.fix)
        return None
    return None if host == "*" else host
