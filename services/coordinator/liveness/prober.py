"""Asks every engine with a URL whether it lives, and keeps the answers in the KV bucket ``kv_liveness``.

Several coordinators may run; the one that holds the lease asks. What is not alive is said again from time to time, so
that readers can tell a verdict from one that nobody stands behind any more.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import httpx
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NoKeysError

from schemas.liveness import Liveness, LivenessState, dump_liveness
from schemas.registry import EngineRecord
from schemas.subjects import LIVENESS_BUCKET, engine_key
from services.coordinator.liveness.settings import LivenessSettings
from services.coordinator.liveness.verdict import EngineHealth, is_asleep
from services.runtime.kv_lease import KvLease
from services.runtime.logging import get_logger
from services.runtime.registry_store import Registry
from services.runtime.tasks import end_tasks

LEASE = "engine_checks"
RETRY_SECONDS = 1.0
MAX_METRICS_BYTES = 4 * 1024 * 1024
SERVER_ERROR = 500

log = get_logger("liveness")


class Prober:
    """The checks of one coordinator. on_asleep: told an engine rank that has just fallen asleep."""

    def __init__(
        self,
        js: JetStreamContext,
        registry: Callable[[], Registry],
        settings: LivenessSettings,
        on_asleep: Callable[[EngineRecord], Awaitable[None]],
    ) -> None:
        self._js = js
        self._registry = registry
        self._settings = settings
        self._on_asleep = on_asleep
        self._lease = KvLease(js, LEASE, settings.lease_ttl)
        self._limit = asyncio.Semaphore(settings.concurrency)
        self._client = httpx.AsyncClient(
            timeout=settings.timeout, trust_env=False, limits=httpx.Limits(max_connections=settings.concurrency)
        )
        self._health: dict[str, EngineHealth] = {}
        self._said: dict[str, tuple[Liveness, float]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to try for the lease, and to ask while it is held."""
        if self._settings.enabled:
            self._lease.start()
            self._task = asyncio.create_task(self._run(), name="liveness")

    async def stop(self) -> None:
        """Stop asking and give the lease up. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
            await self._lease.stop()
        await self._client.aclose()

    async def _run(self) -> None:
        while True:
            await self._lease.wait()
            self._health.clear()
            self._said.clear()
            log.info("checking_engines")
            checks: dict[str, asyncio.Task[None]] = {}
            try:
                await self._forget_unregistered()
                while self._lease.held:
                    self._follow_registry(checks)
                    await self._say()
                    await asyncio.sleep(min(0.5, self._settings.interval / 2))
            except (NatsError, TimeoutError, OSError) as error:
                log.info("liveness_not_written", error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                await end_tasks(checks.values())

    def _follow_registry(self, checks: dict[str, asyncio.Task[None]]) -> None:
        """One task per URL, none for those that left."""
        wanted = {engine.url: engine.engine_type for engine in self._registry().engines.values() if engine.url}
        for url in checks.keys() - wanted.keys():
            checks.pop(url).cancel()
            self._health.pop(url, None)
        for url in wanted.keys() - checks.keys():
            checks[url] = asyncio.create_task(self._check(url, wanted[url]), name="check")

    async def _check(self, url: str, engine_type: str) -> None:
        health = self._health.setdefault(url, EngineHealth())
        reads_metrics = self._settings.sleep_interval > 0 and engine_type == "vLLM"
        metrics_read = 0.0
        # Engines that were registered together are not asked together.
        await asyncio.sleep(random.uniform(0, self._settings.interval / 4))
        while True:
            if reads_metrics and health.state and time.monotonic() - metrics_read > self._settings.sleep_interval:
                metrics_read = time.monotonic()
                health.asleep = await self._is_asleep(url, health.asleep)
            problem = await self._problem(url)
            if health.observe(problem, self._settings.failures, time.time()):
                log.info("engine", url=url, state=health.state, reason=health.reason)
            await asyncio.sleep(self._settings.interval * random.uniform(0.9, 1.1))

    async def _problem(self, url: str) -> str:
        """What is wrong with an engine, empty when it answers. Any answer but a server error is one: it lives."""
        async with self._limit:
            try:
                answer = await self._client.get(url.rstrip("/") + self._settings.path)
            except httpx.TimeoutException:
                return f"no answer within {self._settings.timeout:g} s"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return f"{type(error).__name__}: {str(error)[:120]}"
        return f"status {answer.status_code}" if answer.status_code >= SERVER_ERROR else ""

    async def _is_asleep(self, url: str, before: bool) -> bool:
        async with self._limit:
            try:
                async with self._client.stream("GET", url.rstrip("/") + "/metrics") as answer:
                    body = b""
                    async for piece in answer.aiter_bytes():
                        body += piece
                        if len(body) > MAX_METRICS_BYTES:
                            return before
            except (httpx.HTTPError, httpx.InvalidURL):
                return before
        return is_asleep(body.decode("utf-8", "replace")) if answer.is_success else before

    async def _say(self) -> None:
        """Write what changed, and again what is not alive. Raises nats.errors.Error."""
        bucket = await self._js.key_value(LIVENESS_BUCKET)
        engines = {engine_key(*key): engine for key, engine in self._registry().engines.items()}
        for key in self._said.keys() - engines.keys():
            await bucket.purge(key)
            del self._said[key]
        now = time.monotonic()
        for key, engine in engines.items():
            health = self._health.get(engine.url or "")
            if health is None or health.state is None:
                continue
            said, said_at = self._said.get(key, (None, 0.0))
            changed = said is None or (said.state, said.generation) != (health.state, engine.generation)
            repeat = health.state is not LivenessState.ALIVE and now - said_at > self._settings.repeat_interval
            if not changed and not repeat:
                continue
            record = Liveness(
                engine.instance_id,
                engine.dp_rank,
                health.state,
                health.since,
                time.time(),
                engine.generation,
                health.reason,
            )
            await bucket.put(key, dump_liveness(record))
            self._said[key] = (record, now)
            if changed and health.state is LivenessState.ASLEEP:
                await self._on_asleep(engine)

    async def _forget_unregistered(self) -> None:
        """Records of engines that were unregistered while nobody asked."""
        bucket = await self._js.key_value(LIVENESS_BUCKET)
        keys: list[str] = []
        with contextlib.suppress(NoKeysError):
            keys = await bucket.keys()
        wanted = {engine_key(*key) for key, engine in self._registry().engines.items() if engine.url}
        for key in keys:
            if key not in wanted:
                await bucket.purge(key)
