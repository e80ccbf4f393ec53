"""From a store's own metrics page to the families that dashboards read, equal for every backend (pure).

``kv_store_size{layer, stat}`` in bytes, ``kv_store_ratio{layer, stat}`` from 0 to 1, ``kv_store_keys``,
``kv_store_eviction{stat}``, and everything the store says under the prefix ``kv_store_native_``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

NATIVE_PREFIX = "kv_store_native_"
LAYERS = ("npu", "cpu", "ssd")

# What each backend calls the layers' bytes: layer -> (used, capacity), each a sample name and the labels it must have.
_Source = tuple[str, dict[str, str]]
_MEMCACHE_MEDIA = {"npu": "hbm", "cpu": "dram", "ssd": "ssd"}
SIZES: dict[str, dict[str, tuple[_Source, _Source]]] = {
    "Memcache": {
        layer: (
            ("memcache_allocated_bytes", {"medium": medium}),
            ("memcache_total_capacity_bytes", {"medium": medium}),
        )
        for layer, medium in _MEMCACHE_MEDIA.items()
    },
    "Mooncake": {
        "cpu": (("master_allocated_bytes", {}), ("master_total_capacity_bytes", {})),
        "ssd": (("master_allocated_file_size_bytes", {}), ("master_total_file_capacity_bytes", {})),
    },
}
KEYS = {"Memcache": "memcache_stored_keys", "Mooncake": "master_key_count"}
EVICTIONS = {
    "Memcache": {"success": "memcache_evict_operations_total"},
    "Mooncake": {"success": "master_successful_evictions_total", "attempts": "master_attempted_evictions_total"},
}
_PREFIXES = {"memcache_": "Memcache", "master_": "Mooncake"}


@dataclass(frozen=True, slots=True)
class StorePage:
    """A store's page, read. backend: None when it is neither's. refused: lines that could not be read or were over
    the limit."""

    backend: str | None
    families: tuple[Metric, ...]
    refused: int


def read_page(text: str, backend: str | None, max_samples: int) -> StorePage:
    """Read a metrics page; a bad line costs itself only. backend: as configured, None to tell it from the names.

    Raises ValueError for a page without a single value.
    """
    native: list[Metric] = []
    values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    taken = refused = 0
    families, refused = _families(text)
    for family in families:
        copy = Metric(NATIVE_PREFIX + family.name, family.documentation, family.type)
        for sample in family.samples:
            if not sample.value >= 0:  # NaN too: stores write -1 and NaN for "not known"
                continue
            if taken >= max_samples:
                refused += 1
                continue
            taken += 1
            values.setdefault(sample.name, []).append((sample.labels, sample.value))
            copy.add_sample(NATIVE_PREFIX + sample.name, sample.labels, sample.value)
        native.append(copy)
    if not taken:
        raise ValueError("the page carries no metrics")
    if backend is None:
        backend = next(
            (known for prefix, known in _PREFIXES.items() if any(n.startswith(prefix) for n in values)), None
        )
    summary = _summary(backend, values) if backend is not None else []
    return StorePage(backend, (*summary, *native), refused)


def _families(text: str) -> tuple[list[Metric], int]:
    try:
        return list(text_string_to_metric_families(text)), 0
    except ValueError:
        pass
    sound, refused = [], 0
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            sound.append(line)
            continue
        try:
            list(text_string_to_metric_families(line))
        except ValueError:
            refused += 1
        else:
            sound.append(line)
    try:
        return list(text_string_to_metric_families("\n".join(sound))), refused
    except ValueError:
        samples = [line for line in sound if not line.startswith("#")]
        return list(text_string_to_metric_families("\n".join(samples))), refused


def _total(
    values: Mapping[str, list[tuple[Mapping[str, str], float]]], name: str, labels: Mapping[str, str]
) -> float | None:
    """The sum over a name's samples that carry these labels, None when there is none."""
    found = [
        value
        for own, value in values.get(name, [])
        if all(own.get(label, "").lower() == wanted for label, wanted in labels.items())
    ]
    return sum(found) if found else None


def _summary(backend: str, values: Mapping[str, list[tuple[Mapping[str, str], float]]]) -> Iterator[Metric]:
    size = GaugeMetricFamily("kv_store_size", "Size of the KV store per layer, in bytes", labels=("layer", "stat"))
    ratio = GaugeMetricFamily(
        "kv_store_ratio", "Share of the KV store's capacity that is used, 0 to 1", labels=("layer", "stat")
    )
    used_of_all = total_of_all = 0.0
    known = False
    for layer, (used_source, total_source) in SIZES[backend].items():
        used, total = _total(values, *used_source), _total(values, *total_source)
        if used is None or total is None:
            continue
        known = True
        used_of_all, total_of_all = used_of_all + used, total_of_all + total
        _add_layer(size, ratio, layer, used, total)
    if known:
        _add_layer(size, ratio, "all", used_of_all, total_of_all)
    keys = GaugeMetricFamily("kv_store_keys", "Keys in the KV store")
    if (count := _total(values, KEYS[backend], {})) is not None:
        keys.add_metric((), count)
    eviction = GaugeMetricFamily(
        "kv_store_eviction", "Evictions of the KV store since its start (success, attempts)", labels=("stat",)
    )
    for stat, name in EVICTIONS[backend].items():
        if (count := _total(values, name, {})) is not None:
            eviction.add_metric((stat,), count)
    yield from (size, ratio, keys, eviction)


def _add_layer(size: GaugeMetricFamily, ratio: GaugeMetricFamily, layer: str, used: float, total: float) -> None:
    size.add_metric((layer, "usage"), used)
    size.add_metric((layer, "total"), total)
    if total > 0:
        ratio.add_metric((layer, "usage_rate"), used / total)
