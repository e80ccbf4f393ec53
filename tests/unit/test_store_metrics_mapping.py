"""From a store's metrics page to equal families for both backends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from services.coordinator.store_metrics.mapping import StorePage, read_page

MEMCACHE = """\
# HELP memcache_total_capacity_bytes Total capacity by medium in bytes
# TYPE memcache_total_capacity_bytes gauge
memcache_total_capacity_bytes{medium="hbm"} 0
memcache_total_capacity_bytes{medium="dram"} 4000
memcache_total_capacity_bytes{medium="ssd"} 6000
# TYPE memcache_allocated_bytes gauge
memcache_allocated_bytes{medium="hbm"} 0
memcache_allocated_bytes{medium="dram"} 1000
memcache_allocated_bytes{medium="ssd"} 1500
# TYPE memcache_evict_operations_total counter
memcache_evict_operations_total 7
# HELP memcache_stored_keys Current number of stored keys
# TYPE memcache_stored_keys gauge
memcache_stored_keys 42
# TYPE memcache_rewarm_bytes_current gauge
memcache_rewarm_bytes_current -1
"""
MOONCAKE = """\
# HELP master_allocated_bytes Total memory bytes currently allocated across all segments
# TYPE master_allocated_bytes gauge
master_allocated_bytes 1000
master_total_capacity_bytes 4000
master_allocated_file_size_bytes 1500
master_total_file_capacity_bytes 6000
master_key_count 42
# TYPE master_successful_evictions_total counter
master_successful_evictions_total 7
# TYPE master_attempted_evictions_total counter
master_attempted_evictions_total 9
"""


def samples(page: StorePage) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in page.families
        for sample in family.samples
    }


def sizes(page: StorePage) -> dict[str, float]:
    return {
        f"{dict(labels)['layer']}.{dict(labels)['stat']}": value
        for (name, labels), value in samples(page).items()
        if name in ("kv_store_size", "kv_store_ratio")
    }


@pytest.mark.parametrize(("text", "backend"), [(MEMCACHE, "Memcache"), (MOONCAKE, "Mooncake")])
@pytest.mark.parametrize("configured", [True, False])
def test_both_backends_give_the_same_families_in_bytes(text: str, backend: str, configured: bool) -> None:
    page = read_page(text, backend if configured else None, 1000)
    assert page.backend == backend
    found = sizes(page)
    found.pop("npu.usage", None)
    found.pop("npu.total", None)
    assert found == {
        "cpu.usage": 1000,
        "cpu.total": 4000,
        "cpu.usage_rate": 0.25,
        "ssd.usage": 1500,
        "ssd.total": 6000,
        "ssd.usage_rate": 0.25,
        "all.usage": 2500,
        "all.total": 10000,
        "all.usage_rate": 0.25,
    }
    assert samples(page)["kv_store_keys", ()] == 42
    assert samples(page)["kv_store_eviction", (("stat", "success"),)] == 7


def test_what_a_store_does_not_say_is_absent_and_not_zero() -> None:
    page = read_page(MEMCACHE, None, 1000)
    assert ("kv_store_eviction", (("stat", "attempts"),)) not in samples(page)
    assert samples(read_page(MOONCAKE, None, 1000))["kv_store_eviction", (("stat", "attempts"),)] == 9
    only_keys = read_page("master_key_count 1\n", None, 1000)
    assert [name for name, _ in samples(only_keys)] == ["kv_store_keys", "kv_store_native_master_key_count"]
    assert "npu.usage_rate" not in sizes(page)


def test_everything_else_passes_under_a_prefix_with_help_and_type() -> None:
    page = read_page(MEMCACHE, None, 1000)
    assert samples(page)["kv_store_native_memcache_stored_keys", ()] == 42
    assert samples(page)["kv_store_native_memcache_evict_operations_total", ()] == 7
    text = exposition(page)
    assert "# HELP kv_store_native_memcache_stored_keys Current number of stored keys" in text
    assert "# TYPE kv_store_native_memcache_evict_operations_total counter" in text
    for family in ("kv_store_size", "kv_store_ratio", "kv_store_keys", "kv_store_eviction"):
        assert f"# HELP {family} " in text
        assert f"# TYPE {family} gauge" in text
    assert "in bytes" in text


def test_negative_values_and_nan_mean_not_known_and_are_left_out() -> None:
    page = read_page("memcache_stored_keys -1\nmemcache_x NaN\nmemcache_y 1\n", None, 1000)
    assert [name for name, _ in samples(page)] == ["kv_store_native_memcache_y"]


def test_a_bad_line_costs_itself_only_and_is_counted() -> None:
    page = read_page(MOONCAKE + "master_broken{ 1\n\x00\nmaster_late 5\n", None, 1000)
    assert page.refused == 2
    assert samples(page)["kv_store_native_master_late", ()] == 5
    assert samples(page)["kv_store_keys", ()] == 42


def test_samples_above_the_limit_are_left_out_and_counted() -> None:
    page = read_page("".join(f'master_x{{segment="{i}"}} 1\n' for i in range(50)), None, 10)
    assert (len(samples(page)), page.refused) == (10, 40)


@pytest.mark.parametrize("text", ["", "<html>nothing here</html>", "# only comments\n"])
def test_a_page_without_metrics_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no metrics"):
        read_page(text, "Memcache", 1000)


def test_an_unknown_store_passes_through_without_a_summary() -> None:
    page = read_page("other_keys 5\n", None, 1000)
    assert page.backend is None
    assert list(samples(page).values()) == [5]


@given(st.text())
def test_no_page_makes_the_reader_fail_otherwise(text: str) -> None:
    try:
        page = read_page(text + "\nmaster_key_count 1\n", None, 100)
    except ValueError as error:
        pytest.fail(f"refused a page with one good line: {error}")
    assert exposition(page)


def exposition(page: StorePage) -> str:
    class Fixed:
        def collect(self) -> list[Metric]:
            return list(page.families)

    registry = CollectorRegistry()
    registry.register(Fixed())  # type: ignore[arg-type]
    return generate_latest(registry).decode()
