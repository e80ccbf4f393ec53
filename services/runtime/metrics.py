"""Prometheus metrics of a process: one registry, names under ``kvroute_``, labels from configuration only."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

REGISTRY = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=REGISTRY)

LATENCY_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def _name(name: str) -> str:
    if not name.startswith("kvroute_"):
        raise ValueError(f"metric names start with kvroute_, got {name}")
    return name


def counter(name: str, help_text: str, labels: Sequence[str] = (), registry: CollectorRegistry = REGISTRY) -> Counter:
    """A counter; its name ends in _total."""
    return Counter(_name(name), help_text, labels, registry=registry)


def gauge(name: str, help_text: str, labels: Sequence[str] = (), registry: CollectorRegistry = REGISTRY) -> Gauge:
    """A gauge."""
    return Gauge(_name(name), help_text, labels, registry=registry)


def histogram(
    name: str,
    help_text: str,
    labels: Sequence[str] = (),
    buckets: Sequence[float] = LATENCY_BUCKETS,
    registry: CollectorRegistry = REGISTRY,
) -> Histogram:
    """A histogram; seconds unless the name says otherwise."""
    return Histogram(_name(name), help_text, labels, buckets=tuple(buckets), registry=registry)
