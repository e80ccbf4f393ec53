"""What may stand in the registry side by side, and which generation comes next (pure)."""

from schemas.blocks import Tier
from schemas.registry import EngineRecord, PoolRecord
from services.runtime.registry_store import AnyRecord, Registry

LiveRecord = EngineRecord | PoolRecord


class EndpointTakenError(Exception):
    """Another instance is registered with the same publisher."""

    def __init__(self, endpoint: str, owner: str) -> None:
        super().__init__(f"endpoint {endpoint} is registered for instance {owner}")
        self.endpoint = endpoint
        self.owner = owner


class LaterLifeError(Exception):
    """The instance was registered anew since the life that is to be unregistered."""

    def __init__(self, instance_id: str, generation: int) -> None:
        super().__init__(f"instance {instance_id} was registered anew, as generation {generation}")


class KindTakenError(Exception):
    """The instance id is registered as the other kind."""


def same_registration(current: LiveRecord, wanted: LiveRecord) -> bool:
    """Whether two records describe the same life of a publisher: all but generation, origin and pause are equal."""
    return current == _with_administration_of(wanted, current)


def kept(current: LiveRecord, wanted: LiveRecord) -> LiveRecord | None:
    """What to write for a repeated registration: None when nothing; the current record under a new keeper's name."""
    if wanted.origin in ("api", current.origin):
        return None
    return current.model_copy(update={"origin": wanted.origin})


def _with_administration_of(record: LiveRecord, other: LiveRecord) -> LiveRecord:
    changes: dict[str, object] = {"generation": other.generation, "origin": other.origin}
    if isinstance(other, EngineRecord):
        changes["paused"] = other.paused
    return record.model_copy(update=changes) if record.kind == other.kind else record


def next_generation(current: AnyRecord | None, now: float) -> int:
    """Milliseconds since the epoch, and always above the generation before. now: seconds since the epoch."""
    return max(int(now * 1000), current.generation + 1 if current is not None else 1)


def publishers(record: LiveRecord) -> frozenset[str]:
    """The endpoints that belong to this record alone (cpu and disk workers are shared by a node's instances)."""
    if isinstance(record, PoolRecord):
        return frozenset((record.endpoint,))
    return frozenset(url for tier, url in record.endpoints.items() if tier is Tier.NPU)


def rivals(record: LiveRecord, registry: Registry) -> list[LiveRecord]:
    """Records of other instances, or of this id as another kind, that cannot stand beside this one."""
    wanted = publishers(record)
    others: list[LiveRecord] = [*registry.engines.values(), *registry.pools.values()]
    return [
        other
        for other in others
        if (other.instance_id == record.instance_id and other.kind != record.kind)
        or (other.instance_id != record.instance_id and not wanted.isdisjoint(publishers(other)))
    ]


def check_free(record: LiveRecord, registry: Registry) -> None:
    """Raise EndpointTakenError or KindTakenError when the record cannot stand beside the registered ones."""
    for other in rivals(record, registry):
        if other.instance_id == record.instance_id:
            raise KindTakenError(f"instance {record.instance_id} is registered as {_article(other.kind)}")
        raise EndpointTakenError(min(publishers(record) & publishers(other)), other.instance_id)


def knows(registry: Registry, instance_id: str) -> bool:
    """Whether an engine rank or a pool of this id is registered."""
    return instance_id in registry.pools or any(instance == instance_id for instance, _ in registry.engines)


def _article(kind: str) -> str:
    return "an engine" if kind == "engine" else "a pool"
