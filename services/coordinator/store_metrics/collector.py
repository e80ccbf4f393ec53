"""Collects the store's metrics in the background; whoever asks gets the last ones at once."""

import asyncio
import time
from collections.abc import Callable, Iterator

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.coordinator.store_metrics.endpoint import StoreEndpoint
from services.coordinator.store_metrics.mapping import StorePage, read_page
from services.coordinator.store_metrics.settings import StoreMetricsSettings
from services.runtime.logging import get_logger
from services.runtime.tasks import end_tasks

log = get_logger("store_metrics")


class StoreMetrics(Collector):
    """The task that collects, and the Prometheus collector that shows what it has. Does nothing without a URL."""

    def __init__(
        self, settings: StoreMetricsSettings, endpoint: StoreEndpoint, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.endpoint = endpoint
        self._settings = settings
        self._clock = clock
        self._page: StorePage | None = None
        self._succeeded_at = 0.0
        self._problem = "not collected yet"
        self._counts = {"success": 0, "failure": 0}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to collect, unless switched off or without an endpoint (said once)."""
        if self.endpoint.url is None:
            say = log.warning if self.endpoint.wanted else log.info
            say("store_metrics_off", reason=self.endpoint.reason)
            return
        log.info("store_metrics_on", url=self.endpoint.url, chosen_by=self.endpoint.reason)
        self._task = asyncio.create_task(self._run(self.endpoint.url), name="store-metrics")

    async def stop(self) -> None:
        """Stop collecting."""
        if self._task is not None:
            await end_tasks([self._task])

    @property
    def problem(self) -> str:
        """What is wrong now, empty when the last collection succeeded."""
        return self._problem if self.endpoint.url is not None else ""

    async def _run(self, url: str) -> None:
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._settings.timeout) as client:
            while True:
                await self.collect_once(client, url)
                await asyncio.sleep(self._settings.interval)

    async def collect_once(self, client: httpx.AsyncClient, url: str) -> None:
        """One collection; never raises for what the store does."""
        try:
            async with asyncio.timeout(self._settings.timeout):
                text = await self._fetch(client, url)
            page = read_page(text, self._settings.backend, self._settings.max_samples)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, OSError) as error:
            self._failed(str(error) or type(error).__name__)
            return
        if self._problem:
            log.info("store_metrics_collected", backend=page.backend, families=len(page.families))
        self._page, self._problem, self._succeeded_at = page, "", self._clock()
        self._counts["success"] += 1

    async def _fetch(self, client: httpx.AsyncClient, url: str) -> str:
        async with client.stream("GET", url, headers={"Accept": "text/plain"}) as response:
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"the store answered {response.status_code}")
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > self._settings.max_bytes:
                    raise ValueError(f"the metrics page is larger than {self._settings.max_bytes} bytes")
        return body.decode("utf-8", "replace")

    def _failed(self, problem: str) -> None:
        self._counts["failure"] += 1
        if problem != self._problem:
            log.warning("store_metrics_failed", url=self.endpoint.url, problem=problem)
        self._problem = problem

    def collect(self) -> Iterator[Metric]:
        """The last values, beside whether they are current; nothing at all when nothing is collected."""
        if self.endpoint.url is None:
            return
        age = self._clock() - self._succeeded_at if self._page is not None else None
        if age is not None and age > self._settings.drop_after:
            self._page = None
        stale = self._page is not None and self._stale(age)
        up = not self._problem and not stale
        yield GaugeMetricFamily("kv_store_up", "1 when the last collection of the store's metrics succeeded", value=up)
        yield GaugeMetricFamily(
            "kv_store_stale", "1 while the kv_store families show values of an earlier collection", value=stale
        )
        if age is not None:
            yield GaugeMetricFamily("kv_store_age_seconds", "Age of the last successful collection", value=age)
        collections = CounterMetricFamily("kv_store_collections", "Collections tried, by result", labels=("result",))
        for result, count in self._counts.items():
            collections.add_metric((result,), count)
        yield collections
        if self._page is not None:
            yield GaugeMetricFamily(
                "kv_store_refused_lines", "Lines of the store's page that were not readable or too many",
                value=self._page.refused,
            )  # fmt: skip
            yield from self._page.families

    def _stale(self, age: float | None) -> bool:
        """After a failure, and when the collecting task itself is held up."""
        late = 2 * (self._settings.interval + self._settings.timeout)
        return bool(self._problem) or (age is not None and age > late)

    def describe(self) -> list[Metric]:
        """Names are only known from the store."""
        return []
