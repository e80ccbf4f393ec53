"""The embedded stack: servers first, then services, ready before it is handed out, stopped in the opposite order."""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from kvroute.embedded.addresses import Addresses, choose_addresses
from kvroute.embedded.binaries import BinaryMissingError
from kvroute.embedded.environment import service_environment
from kvroute.embedded.folder import FolderError, data_folder
from kvroute.embedded.options import OnLine, Say, StackOptions
from kvroute.embedded.ports import NoPortError
from kvroute.embedded.readiness import wait_ready
from kvroute.embedded.servers import (
    NATS_PORT,
    REDIS_PORT,
    ServerCommand,
    ServerError,
    nats_command,
    redis_command,
    start_server,
)
from kvroute.embedded.supervised import Supervised
from services.runtime.config import Config, load_config
from services.runtime.logging import masked

KILL_AFTER_GRACE_SECONDS = 2.0
SERVER_GRACE_SECONDS = 5.0
PROBE_SECONDS = 2.0


class StackError(RuntimeError):
    """The stack does not come up, or cannot go on; the text says what to do."""


class EmbeddedStack:
    """``async with EmbeddedStack(StackOptions()) as stack:`` everything is ready inside and gone afterwards.

    Children that end are started again. say: gets a line when something happens. on_line: gets (name, line) for what
    the services print; without it, only the last lines of one that crashed are said. Entering raises StackError, and
    ConfigError (services.runtime.config) for a configuration that cannot be used.
    """

    def __init__(
        self, options: StackOptions | None = None, say: Say = lambda text: None, on_line: OnLine | None = None
    ) -> None:
        self.options = options or StackOptions()
        self.config: Config = Config()
        self.addresses = Addresses({}, {})
        self.nats_url = ""
        self.redis_url = ""
        self.stopping = False
        self._say = say
        self._on_line = on_line
        self._children: dict[str, Supervised] = {}
        self._failed: asyncio.Future[str] | None = None
        self._folder: Path | None = None
        self._cleanup = contextlib.ExitStack()

    @property
    def router_url(self) -> str:
        """Base URL of the router."""
        return self.addresses.url("router")

    @property
    def inference_url(self) -> str:
        """Base URL of the OpenAI API; its routes begin with /v1."""
        return self.addresses.url("coordinator", "inference_port")

    @property
    def management_url(self) -> str:
        """Base URL of the coordinator's registration and health."""
        return self.addresses.url("coordinator", "management_port")

    @property
    def metrics_url(self) -> str:
        """Base URL of the coordinator's metrics."""
        return self.addresses.url("coordinator", "metrics_port")

    @property
    def nats_url_for_display(self) -> str:
        """The NATS URL without user and password."""
        return masked(self.nats_url)

    def child(self, name: str) -> Supervised:
        """The process of that name: a service, ``nats`` or ``redis`` (where it was started here)."""
        return self._children[name]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the moment by name."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None and child.running}

    async def __aenter__(self) -> Self:
        options = self.options
        environment = {**os.environ, **options.environment}
        self.config = load_config(options.config_file, environment)
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._start_servers()
            await self._start_services(environment)
        except BaseException as error:
            await self._stop()
            if isinstance(error, BinaryMissingError | FolderError | NoPortError | ServerError | OSError):
                raise StackError(str(error)) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait_failed(self) -> None:
        """Waits for ever; raises StackError when a service says that it can never work as it is configured."""
        assert self._failed is not None, "the stack was not entered"
        raise StackError(await asyncio.shield(self._failed))

    def kill(self) -> None:
        """kill -9 of everything at once, nothing is started again; the context has still to be left."""
        for child in self._children.values():
            child.give_up()
            child.kill()

    async def _start_servers(self) -> None:
        options, config = self.options, self.config
        self.nats_url = options.nats_url or (config.nats.url if "url" in config.nats.model_fields_set else "")
        redis_given = bool(config.redis.model_fields_set & {"url", "sentinels"})
        self.redis_url = options.redis_url or (config.redis.url.get_secret_value() if redis_given else "")
        if self.nats_url:
            self._say(f"nats is at {masked(self.nats_url)}, not started here")
        else:
            port = await self._start_server("nats", nats_command, NATS_PORT)
            self.nats_url = f"nats://127.0.0.1:{port}"
            self._say(f"nats is up at {self.nats_url}")
        if self.redis_url:
            self._say(f"redis is at {masked(self.redis_url)}, not started here")
        else:
            port = await self._start_server("redis", redis_command, REDIS_PORT)
            self.redis_url = f"redis://127.0.0.1:{port}/0"
            self._say(f"redis is up at {self.redis_url}")

    async def _start_server(self, name: str, command: ServerCommand, usual_port: int) -> int:
        if self._folder is None:
            self._folder = self._cleanup.enter_context(data_folder(self.options.data_dir))
        server, port = await start_server(
            name, command, usual_port, self._folder / name, self.options.any_ports, self._say
        )
        self._children[name] = server
        return port

    async def _start_services(self, environment: dict[str, str]) -> None:
        options = self.options
        self.addresses = choose_addresses(self.config, options.services, options.any_ports, self._say)
        environment = service_environment(
            environment,
            self.config,
            options.config_file,
            self.addresses,
            self.nats_url,
            self.redis_url,
            self._folder / "nats" if self._folder is not None and "nats" in self._children else None,
        )
        began = time.monotonic()
        for name in options.services:
            # -P: a folder "services" where the command happens to be called is not meant.
            command = [sys.executable, "-P", "-m", f"services.{name}"]
            child = Supervised(name, command, environment, self._say, self._on_line, self._fail)
            self._children[name] = child
            await child.start()
        reasons = dict.fromkeys(options.services, "does not answer yet")
        ready = asyncio.create_task(self._all_ready(reasons, began), name="readiness")
        try:
            await self._until_ready(ready, reasons)
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _all_ready(self, reasons: dict[str, str], began: float) -> None:
        async with httpx.AsyncClient(timeout=PROBE_SECONDS, trust_env=False) as client, asyncio.TaskGroup() as group:
            for name in self.options.services:
                group.create_task(self._announce_ready(client, name, reasons, began))

    async def _announce_ready(
        self, client: httpx.AsyncClient, name: str, reasons: dict[str, str], began: float
    ) -> None:
        await wait_ready(client, name, self.addresses.readiness_url(name), reasons)
        self._say(f"{name} is ready after {time.monotonic() - began:.1f} s")

    async def _until_ready(self, ready: asyncio.Task[None], reasons: dict[str, str]) -> None:
        assert self._failed is not None
        ends: set[asyncio.Future[Any]] = {ready, self._failed}
        await asyncio.wait(ends, timeout=self.options.start_timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            raise StackError(self._failed.result())
        if not ready.done():
            lines = [f"not ready within {self.options.start_timeout:g} s:"]
            for name, reason in reasons.items():
                lines += [f"  {name}: {reason}", *(f"    {line}" for line in self._children[name].last_lines[-5:])]
            raise StackError("\n".join(lines))
        await ready

    def _fail(self, reason: str) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)

    async def _stop(self) -> None:
        """Services first, so that what they have reaches NATS and Redis."""
        self.stopping = True
        servers = {"nats", "redis"}
        for child in self._children.values():
            child.give_up()
        for part, grace in (
            (self._children.keys() - servers, self.config.runtime.shutdown_grace + KILL_AFTER_GRACE_SECONDS),
            (self._children.keys() & servers, SERVER_GRACE_SECONDS),
        ):
            await asyncio.gather(*(self._children[name].stop(grace) for name in part))
        self._cleanup.close()
        self._folder = None
