"""uvicorn's HTTP protocol with a deadline by which a request must have arrived: half of one costs a while only."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.runtime.metrics import counter

TOO_SLOW = counter(
    "kvroute_http_slow_requests_total", "Connections closed because their request did not arrive in time"
)


def protocol_with_deadline(receive_timeout: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn. receive_timeout: seconds from the first byte expected to the last one of a body."""

    class Protocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect()

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._expect()
            super().on_message_begin()

        def on_message_complete(self) -> None:
            self._arrived()
            super().on_message_complete()

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
