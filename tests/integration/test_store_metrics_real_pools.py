"""The metrics of real stores: Mooncake's master and memcache's MetaService as the package index has them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.utils import floatToGoString

from services.coordinator.store_metrics.collector import StoreMetrics
from services.coordinator.store_metrics.endpoint import store_endpoint
from services.coordinator.store_metrics.settings import StoreMetricsSettings
from tests.conftest import free_port, is_listening, wait_for
from tests.real_pools import memcache_meta_service, mooncake_client, mooncake_master

pytestmark = [pytest.mark.real_pool, pytest.mark.timeout(300)]


@contextmanager
def served(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """Run a store until the block ends; skips when this machine cannot run it at all."""
    log = folder / "store.log"
    os.chmod(command[0], 0o755)
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: process.poll() is not None or is_listening(port), f"{command[0]} on port {port}", 60)
        if process.poll() is not None:
            pytest.skip(f"{command[0]} does not run here: {log.read_text(errors='replace')[-300:]}")
        yield
    finally:
        process.kill()
        process.wait(timeout=10)


@contextmanager
def one_key_stored(rpc_port: int) -> Iterator[None]:
    """A client that lends the master 64 MiB and keeps 1000 bytes in it."""
    command = mooncake_client(rpc_port)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout is not None
        try:
            assert any(line.endswith(b"stored\n") for line in client.stdout), "the client could not store"
            yield
        finally:
            client.kill()


async def scraped(port: int, backend: str | None) -> str:
    settings = StoreMetricsSettings(backend=backend, port=port, service="127.0.0.1", timeout=10)
    metrics = StoreMetrics(settings, store_endpoint(settings, {}))
    assert metrics.endpoint.url is not None
    async with httpx.AsyncClient(trust_env=False) as client:
        await metrics.collect_once(client, metrics.endpoint.url)
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


@pytest.mark.parametrize("backend", [None, "mooncake"])
async def test_a_real_mooncake_master_is_scraped(tmp_path: Path, backend: str | None) -> None:
    port = free_port()
    with served(mooncake_master(free_port(), port), port, tmp_path):
        text = await scraped(port, backend)
    assert "kv_store_up 1.0" in text
    assert "kv_store_refused_lines 0.0" in text
    assert 'kv_store_size{layer="cpu",stat="total"} 0.0' in text
    assert 'kv_store_size{layer="ssd",stat="usage"} 0.0' in text
    assert "kv_store_keys 0.0" in text
    assert 'kv_store_eviction{stat="attempts"} 0.0' in text
    assert "# TYPE kv_store_ratio gauge" in text
    assert "kv_store_native_master_active_clients 0.0" in text


async def test_what_a_client_stores_in_mooncake_is_counted_in_bytes(tmp_path: Path) -> None:
    rpc_port, port = free_port(), free_port()
    with served(mooncake_master(rpc_port, port), port, tmp_path), one_key_stored(rpc_port):
        text = await scraped(port, "mooncake")
    assert 'kv_store_size{layer="cpu",stat="usage"} 1000.0' in text
    assert f'kv_store_size{{layer="all",stat="total"}} {floatToGoString(64 << 20)}' in text
    assert "kv_store_keys 1.0" in text
    assert 'kv_store_ratio{layer="cpu",stat="usage_rate"}' in text


@pytest.mark.parametrize("backend", [None, "MEMCACHE"])
async def test_a_real_memcache_meta_service_is_scraped(tmp_path: Path, backend: str | None) -> None:
    port = free_port()
    with served(memcache_meta_service(free_port(), free_port(), port), port, tmp_path):
        text = await scraped(port, backend)
    assert "kv_store_up 1.0" in text
    assert "kv_store_refused_lines 0.0" in text
    assert 'kv_store_size{layer="cpu",stat="total"} 0.0' in text
    assert 'kv_store_size{layer="all",stat="usage"} 0.0' in text
    assert "kv_store_keys 0.0" in text
    assert 'kv_store_eviction{stat="success"} 0.0' in text
    assert "kv_store_native_memcache_kv_events_dropped_total 0.0" in text
