"""How much is registered, as Prometheus metrics (without labels: names come from requests)."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runtime.registry_store import Registry


class RegistryMetrics(Collector):
    """Counts the records of the registry."""

    def __init__(self, registry: Callable[[], Registry | None]) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """One gauge per kind of record; none before NATS is reached."""
        registry = self._registry()
        if registry is None:
            return
        instances = {instance_id for instance_id, _ in registry.engines}
        paused = sum(record.paused for record in registry.engines.values())
        for name, text, count in (
            ("kvroute_registered_instances", "Registered engine instances", len(instances)),
            ("kvroute_registered_ranks", "Registered DP ranks of engines", len(registry.engines)),
            ("kvroute_paused_ranks", "DP ranks that take no new requests", paused),
            ("kvroute_registered_pools", "Registered memory pools", len(registry.pools)),
            ("kvroute_registry_tombstones", "Unregistered records still remembered", len(registry.retired)),
        ):
            yield GaugeMetricFamily(name, text, value=count)

    def describe(self) -> list[Metric]:
        """Nothing is claimed before NATS is reached."""
        return []
