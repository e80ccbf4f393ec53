"""The store's metrics collector against real sockets: good, failing, hung, gone; it never delays anybody."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.coordinator.store_metrics.collector import StoreMetrics
from services.coordinator.store_metrics.endpoint import StoreEndpoint, store_endpoint
from services.coordinator.store_metrics.settings import StoreMetricsSettings

PAGE = b"# TYPE master_key_count gauge\nmaster_key_count 42\n"


class Store:
    """A metrics page whose behaviour a test changes while it runs."""

    def __init__(self) -> None:
        self.behaviour: Callable[[asyncio.StreamWriter], Awaitable[None]] = self.good
        self.requests = 0
        self.asked = asyncio.Event()
        self.server: asyncio.Server | None = None
        self.url = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        self.server = await asyncio.start_server(self._handle, host, 0)
        port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            self.asked.set()
            await self.behaviour(writer)
        writer.close()

    @staticmethod
    async def answer(writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def good(self, writer: asyncio.StreamWriter) -> None:
        await self.answer(writer, "200 OK", PAGE)

    async def failing(self, writer: asyncio.StreamWriter) -> None:
        await self.answer(writer, "500 Internal Server Error", b"no")

    async def huge(self, writer: asyncio.StreamWriter) -> None:
        await self.answer(writer, "200 OK", PAGE * 1000)

    async def silent(self, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def dripping(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"#")
            await writer.drain()
            await asyncio.sleep(0.01)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store()
    await store.start()
    yield store
    assert store.server is not None
    store.server.close()


class Collecting:
    """A collector with short times on a clock that the test can move, and what it shows."""

    def __init__(self, url: str | None, **settings: object) -> None:
        values = {"interval": 0.1, "timeout": 0.3, "drop_after": 30.0, "max_bytes": 4096, **settings}
        self.ahead = 0.0
        self.metrics = StoreMetrics(
            StoreMetricsSettings.model_validate(values),
            StoreEndpoint(url, "test"),
            clock=lambda: time.monotonic() + self.ahead,
        )
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    async def until(self, *lines: str) -> None:
        deadline = time.monotonic() + 10
        while not all(line in self.text() for line in lines):
            assert time.monotonic() < deadline, f"no {lines} in\n{self.text()}"
            await asyncio.sleep(0.02)

    async def __aenter__(self) -> "Collecting":
        self.metrics.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.metrics.stop()


GOOD = ("kv_store_keys 42.0", "kv_store_up 1.0", "kv_store_stale 0.0", "kv_store_native_master_key_count 42.0")
STALE = ("kv_store_keys 42.0", "kv_store_up 0.0", "kv_store_stale 1.0")


async def test_a_store_is_collected_in_the_background(store: Store) -> None:
    async with Collecting(store.url) as collecting:
        await collecting.until(*GOOD)


@pytest.mark.parametrize("fault", ["failing", "huge", "silent", "dripping"])
async def test_a_store_that_fails_or_hangs_leaves_stale_values_and_comes_back(store: Store, fault: str) -> None:
    async with Collecting(store.url) as collecting:
        await collecting.until(*GOOD)
        store.behaviour = getattr(store, fault)
        await collecting.until(*STALE)
        store.behaviour = store.good
        await collecting.until(*GOOD)
        assert 'kv_store_collections_total{result="failure"}' in collecting.text()


async def test_stale_values_are_dropped_after_a_while(store: Store) -> None:
    async with Collecting(store.url) as collecting:
        await collecting.until(*GOOD)
        store.behaviour = store.failing
        await collecting.until(*STALE)
        collecting.ahead = 31.0
        text = collecting.text()
        assert "kv_store_keys" not in text
        assert "kv_store_native" not in text
        assert "kv_store_up 0.0" in text
        assert "kv_store_stale 0.0" in text


async def test_values_are_stale_when_the_collecting_task_itself_is_held_up(store: Store) -> None:
    async with Collecting(store.url) as collecting:
        await collecting.until(*GOOD)
        await collecting.metrics.stop()
        collecting.ahead = 5.0
        assert all(line in collecting.text() for line in STALE)


async def test_showing_the_values_of_a_hung_store_takes_no_time(store: Store) -> None:
    store.behaviour = store.silent
    async with Collecting(store.url, timeout=30.0) as collecting:
        await asyncio.wait_for(store.asked.wait(), 10)
        before = time.perf_counter()
        for _ in range(20):
            collecting.text()
        assert time.perf_counter() - before < 1.0
        before = time.perf_counter()
        await collecting.metrics.stop()
        assert time.perf_counter() - before < 1.0


async def test_nobody_listening_is_a_failure_that_is_shown() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with Collecting(f"http://127.0.0.1:{unused.getsockname()[1]}/metrics") as collecting:
            await collecting.until("kv_store_up 0.0", 'kv_store_collections_total{result="failure"}')
            assert collecting.metrics.problem


async def test_an_ipv6_store_is_collected() -> None:
    store = Store()
    try:
        await store.start("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with Collecting(store.url) as collecting:
        await collecting.until(*GOOD)
    assert store.server is not None
    store.server.close()


async def test_enabled_false_asks_nobody_and_shows_nothing(store: Store) -> None:
    settings = StoreMetricsSettings(enabled=False, url=store.url, interval=0.1)
    metrics = StoreMetrics(settings, store_endpoint(settings, {"KV_STORE_METRICS_URL": store.url}))
    registry = CollectorRegistry()
    registry.register(metrics)
    metrics.start()
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(store.url)).status_code == 200
    assert store.requests == 1
    assert generate_latest(registry) == b""
    assert metrics.problem == ""
    await metrics.stop()
