"""uvicorn inside a running loop: bound before it is announced, stopped within a grace time."""

import asyncio
import contextlib
import socket
from collections.abc import Collection
from typing import Any

import uvicorn

from services.runtime.http_protocol import DirectRoutes, make_protocol
from services.runtime.logging import get_logger

BACKLOG = 2048
RECEIVE_SECONDS = 60.0

log = get_logger("http")


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        return

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """A listening TCP socket; ``::`` also takes IPv4 and falls back to it where there is no IPv6.

    Raises OSError with host, port and cause in its text.
    """
    try:
        return _bind(host, port, reuse_port)
    except OSError as error:
        if host == "::":
            with contextlib.suppress(OSError):
                return _bind("0.0.0.0", port, reuse_port)
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def _bind(host: str, port: int, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class SwitchableApp:
    """An ASGI application that can be exchanged: health routes first, the whole API once its needs are met."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand on to the application of the moment."""
        await self.app(scope, receive, send)


class HttpServer:
    """One ASGI application on one port (0: any free one). receive_timeout: seconds a request may take to arrive.

    direct: answers POST requests to direct_paths by a shorter way than ASGI.
    """

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        reuse_port: bool = False,
        receive_timeout: float = RECEIVE_SECONDS,
        direct: DirectRoutes | None = None,
        direct_paths: Collection[str] = (),
    ) -> None:
        self._direct = direct
        self._direct_paths = direct_paths
        self._app = app
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._receive_timeout = receive_timeout
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._cutting_off = False

    @property
    def port(self) -> int:
        """The port it listens on, the real one after start()."""
        return self._port

    async def start(self) -> None:
        """Bind and serve. Raises OSError when the address cannot be had."""
        listener = bind(self._host, self._port, self._reuse_port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._serve,
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            http=make_protocol(self._receive_timeout, self._direct, self._direct_paths),
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=None,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=f"http-{self._port}")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError(f"the HTTP server on port {self._port} stopped at start")
            await asyncio.sleep(0.005)

    async def stop(self, grace: float = 5.0) -> None:
        """Stop accepting, let running requests finish for `grace` seconds, then cut them off. Idempotent."""
        server, task = self._server, self._task
        if server is None or task is None:
            return
        self._server = self._task = None
        server.should_exit = True
        done, _ = await asyncio.wait({task}, timeout=grace)
        if not done:
            await self._cut_off(server)
            await asyncio.wait({task}, timeout=1.0)
            if not task.done():
                task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _cut_off(self, server: _Server) -> None:
        """End every connection and request. One idle stream must not keep the process alive."""
        requests = set(server.server_state.tasks)
        log.info("requests_cut_off", port=self._port, requests=len(requests))
        self._cutting_off = True
        server.force_exit = True
        for connection in list(server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        if requests:
            # Told of the lost connection, most end by themselves.
            _, requests = await asyncio.wait(requests, timeout=0.1)
        for request in requests:
            request.cancel()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            # Otherwise uvicorn reports each request cut off as a fault of the application, with a trace.
            if not self._cutting_off:
                raise
