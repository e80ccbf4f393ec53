"""uvicorn's HTTP protocol with a deadline by which a request must have arrived, and a short way to hot routes.

Half of a request costs a while only. A hot route is answered where its last byte is read, without a task, a scope and
messages of its own; everything else, and every request that is not plain, goes uvicorn's way.
"""

import asyncio
from collections.abc import Collection
from http import HTTPStatus
from typing import Protocol as Port

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.runtime.metrics import counter

Headers = list[tuple[bytes, bytes]]
DirectAnswer = tuple[int, Headers, bytes]

TOO_SLOW = counter(
    "kvroute_http_slow_requests_total", "Connections closed because their request did not arrive in time"
)
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii", "replace") for status in HTTPStatus
}


class DirectRoutes(Port):
    """Hot routes: what POST requests to these paths are answered with, at once."""

    @property
    def max_body_bytes(self) -> int:
        """The largest body that is read."""
        ...

    def answer(self, path: str, query_string: bytes, headers: Headers, body: bytes) -> DirectAnswer:
        """Status, headers and body. Never raises."""
        ...

    def refuse(self, path: str, headers: Headers, text: str, status: int) -> DirectAnswer:
        """The answer to a request whose body is not read to its end."""
        ...


def make_protocol(
    receive_timeout: float, direct: DirectRoutes | None = None, direct_paths: Collection[str] = ()
) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn. receive_timeout: seconds from the first byte expected to the last one of a body."""
    paths = {path.encode(): path for path in direct_paths}

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _path: str | None = None
        _parts: list[bytes]
        _size = 0
        _last = False
        _discarding = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            self._path = None
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._expect()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            if direct is None or not self._is_plain():
                super().on_headers_complete()
                return
            path, _, self._query_string = self.url.partition(b"?")
            self._path, self._parts, self._size = paths[path], [], 0

        def on_body(self, body: bytes) -> None:
            if self._path is None:
                if not self._discarding:
                    super().on_body(body)
                return
            self._size += len(body)
            if direct is not None and self._size > direct.max_body_bytes:
                text = f"the body is larger than {direct.max_body_bytes} bytes (router.max_body_bytes)"
                # The client goes on sending; what it sends is read and forgotten, and the connection stays good.
                self._discarding = True
                self._write(direct.refuse(self._path, self.headers, text, 413))
                return
            self._parts.append(body)

        def on_message_complete(self) -> None:
            self._arrived()
            if self._discarding:
                self._discarding = False
                return
            if self._path is None or direct is None:
                super().on_message_complete()
                return
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._write(direct.answer(self._path, self._query_string, self.headers, body))

        def shutdown(self) -> None:
            if self._path is None:
                super().shutdown()
            else:
                self._last = True

        def pause_writing(self) -> None:
            super().pause_writing()
            # Who does not read answers is not read from.
            self.flow.pause_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            self.flow.resume_reading()

        def _is_plain(self) -> bool:
            """A whole request can be answered here: POST to a hot route, nothing before it still being answered."""
            return (
                (self.url in paths or self.url.partition(b"?")[0] in paths)
                and self.parser.get_method() == b"POST"
                and self.parser.get_http_version() == "1.1"
                and self.parser.should_keep_alive()
                and not self.parser.should_upgrade()
                and not self.expect_100_continue
                and not self.pipeline
                and (self.cycle is None or self.cycle.response_complete)
                and direct is not None
                and self._announced() <= direct.max_body_bytes
            )

        def _announced(self) -> int:
            """The body's length, as far as it is known."""
            for name, value in self.headers:
                if name == b"content-length":
                    return int(value)
            return 0

        def _write(self, answer: DirectAnswer) -> None:
            status, headers, content = answer
            self._path, self._parts = None, []
            parts = [_STATUS_LINES[status]]
            for name, value in self.server_state.default_headers + headers:
                parts += (name, b": ", value, b"\r\n")
            if self._last:
                parts.append(b"connection: close\r\n")
            parts += (b"\r\n", content)
            self.transport.write(b"".join(parts))
            self.server_state.total_requests += 1
            self._unset_keepalive_if_required()
            if self._last:
                self.transport.close()
            else:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def _expect(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(receive_timeout, self._too_slow)

        def _arrived(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            TOO_SLOW.inc()
            self.transport.abort()

    return Protocol
