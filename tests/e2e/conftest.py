"""One stack for all end-to-end tests: NATS, Redis and the four services as processes; tests use names of their own."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future

import pytest

from kvroute.embedded import EmbeddedStack, StackOptions
from tests.e2e.reported_site import Site
from tests.e2e.support import Pipeline, Router

START_SECONDS = 90.0
STOP_SECONDS = 16.0
SWIFT_STOP_SECONDS = 8.0  # below the grace time: no service may wait for its end


class StackThread:
    """Runs the embedded stack in a thread and an event loop of its own: tests have a new loop each."""

    def __init__(self, **environment: str) -> None:
        self._options = StackOptions(any_ports=True, environment=environment)
        self.stack: Future[EmbeddedStack] = Future()
        self.said: list[str] = []
        self.lines: deque[str] = deque(maxlen=2000)
        self._stop: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="stack", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.lines.clear()
        began = time.monotonic()
        self._stop.set_result(None)
        self._thread.join(timeout=STOP_SECONDS)
        took = time.monotonic() - began
        assert took < SWIFT_STOP_SECONDS, "\n".join(
            [f"the stack took {took:.1f} s to stop:", *self.said[-5:], *self.lines]
        )

    def _keep_line(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    async def _run(self) -> None:
        try:
            async with EmbeddedStack(self._options, self.said.append, self._keep_line) as stack:
                self.stack.set_result(stack)
                await asyncio.wrap_future(self._stop)
        except BaseException as error:
            if self.stack.done():
                raise
            self.stack.set_exception(error)


@pytest.fixture(scope="session")
def stack() -> Iterator[EmbeddedStack]:
    """The whole system on free ports, ready."""
    thread = StackThread()
    yield thread.stack.result(timeout=START_SECONDS)
    thread.stop()
    unexpected = [text for text in thread.said if "started again" in text or "was killed" in text]
    assert unexpected == []


@pytest.fixture
async def router(stack: EmbeddedStack) -> AsyncIterator[Router]:
    """A client of the router."""
    router = Router(stack.router_url)
    yield router
    await router.close()


@pytest.fixture
async def pipeline(stack: EmbeddedStack) -> AsyncIterator[Pipeline]:
    """Knows when everything that was published has reached the router."""
    pipeline = await Pipeline.connect(stack.nats_url, stack.addresses.url("ingest"), stack.router_url)
    yield pipeline
    await pipeline.close()


@pytest.fixture
async def site(router: Router, pipeline: Pipeline) -> AsyncIterator[Site]:
    """Publishers and questions of one field report."""
    site = Site(router, pipeline)
    yield site
    await site.close()
