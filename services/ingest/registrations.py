"""From registry records to the ZMQ publishers that ingest listens to."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from schemas.blocks import Tier
from schemas.events import SourceKind
from schemas.registry import EngineRecord, PoolRecord

Dialect = Literal["vllm", "pool"]

POOL_TIERS = (Tier.CPU, Tier.DISK)


class PublisherKey(NamedTuple):
    """What makes a subscription the same one when the registry changes."""

    source: SourceKind
    instance_id: str
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class Publisher:
    """One ZMQ PUB socket to listen to.

    tiers: what an event without a medium, and a clear, speak of; the first one is where a store without a medium lies.
    dialect: ``vllm`` for the socket that carries an engine's NPU events (its offload events come there too);
    ``pool`` for memory pools and for the cpu / disk sockets of a node's pool worker.
    primary: its sequence and generation are the registration's. An engine's further sockets restart on their own.
    sole: the registration has no other socket. shared: several ranks of the instance are registered with this socket.
    """

    key: PublisherKey
    record: EngineRecord | PoolRecord
    tiers: tuple[Tier, ...]
    dialect: Dialect
    primary: bool = True
    sole: bool = True
    shared: bool = False

    @property
    def replay_endpoint(self) -> str | None:
        """Where this socket's messages can be had again, None where they cannot."""
        if self.record.kind == "pool" or not self.primary or self.dialect != "vllm":
            return None
        return self.record.replay_endpoint or None


def publishers_of(record: EngineRecord | PoolRecord) -> list[Publisher]:
    """The publishers of a registration, one per distinct URL (tiers with the same URL share a socket)."""
    if isinstance(record, PoolRecord):
        key = PublisherKey("pool", record.instance_id, record.dp_rank, record.endpoint)
        return [Publisher(key, record, POOL_TIERS, "pool")]
    tiers_by_endpoint: dict[str, list[Tier]] = {}
    for tier in Tier:
        if endpoint := record.endpoints.get(tier):
            tiers_by_endpoint.setdefault(endpoint, []).append(tier)
    publishers: list[Publisher] = []
    for endpoint, tiers in tiers_by_endpoint.items():
        key = PublisherKey("engine", record.instance_id, record.dp_rank, endpoint)
        sole = len(tiers_by_endpoint) == 1
        if Tier.NPU in tiers:
            publisher = Publisher(key, record, (Tier.NPU,), "vllm", sole=sole)
        else:
            publisher = Publisher(key, record, tuple(tiers), "pool", primary=not publishers, sole=sole)
        publishers.append(publisher)
    return publishers


def publishers_by_key(records: Iterable[EngineRecord | PoolRecord]) -> dict[PublisherKey, Publisher]:
    """All publishers of a registry, in its order."""
    publishers = {publisher.key: publisher for record in records for publisher in publishers_of(record)}
    ranks = Counter((key.source, key.instance_id, key.endpoint) for key in publishers if publishers[key].primary)
    return {
        key: replace(publisher, shared=ranks[key.source, key.instance_id, key.endpoint] > 1 and publisher.primary)
        for key, publisher in publishers.items()
    }
