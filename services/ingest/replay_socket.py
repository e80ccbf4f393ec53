"""One replay through an engine's ROUTER: ask, read until the end mark or until nothing comes any more.

Each replay has a socket of its own, so nothing that came too late is ever taken for an answer to a later question.
"""

import asyncio
from collections.abc import Callable

import zmq

from schemas.wire.frames import END, ReplayMessage, parse_replay, replay_request
from schemas.wire.types import WireError
from services.ingest.zmq_sockets import MESSAGES_PER_TURN, SocketOptions


class ReplaySocket:
    """A DEALER that asks once.

    on_message: gets each message, answers whether to go on; on_malformed: a reply that cannot
    be read, which ends it; on_end: told once, with whether the end mark came. All run on the event loop.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        options: SocketOptions,
        start: int,
        timeout: float,
        on_message: Callable[[ReplayMessage], bool],
        on_malformed: Callable[[WireError], None],
        on_end: Callable[[bool], None],
    ) -> None:
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._on_end = on_end
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._socket = context.socket(zmq.DEALER)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        try:
            for option, value in (
                (zmq.IPV6, 1),
                (zmq.RCVHWM, options.receive_high_water_mark),
                (zmq.MAXMSGSIZE, options.max_message_bytes),
                (zmq.RECONNECT_IVL, int(options.reconnect_min * 1000)),
                (zmq.LINGER, 0),
            ):
                self._socket.setsockopt(option, value)
            self._socket.connect(endpoint)
            self._socket.send_multipart(replay_request(start), zmq.NOBLOCK)
            self._loop.add_reader(self._descriptor, self._read)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self._expect_progress()
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Ask no more; on_end is not told. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _expect_progress(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._timeout, self._end, False)

    def _end(self, complete: bool) -> None:
        if not self._closed:
            self.close()
            self._on_end(complete)

    def _read(self) -> None:
        if self._closed:
            return
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reply = parse_replay(frames)
            except WireError as error:
                self._on_malformed(error)
                self._end(False)
                return
            if reply == END:
                self._end(True)
                return
            if not self._on_message(reply):
                self._end(False)
                return
            self._expect_progress()
        self._loop.call_soon(self._read)
