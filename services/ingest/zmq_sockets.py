"""SUB sockets on the event loop: one per publisher, read when the loop says there is something.

A ZMQ file descriptor is edge-triggered: it speaks up once and then only after everything was read. So every wake-up
reads until the socket is empty, in turns of at most ``MESSAGES_PER_TURN`` so that a busy publisher leaves room for
the others. (Half the processor time of zmq.asyncio, and no thread.)
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import zmq
import zmq.utils.monitor

MESSAGES_PER_TURN = 64
MAX_SOCKETS = 65_535
REDIAL_MARGIN_SECONDS = 0.5
TCP_KEEPALIVE_IDLE_SECONDS = 30
TCP_KEEPALIVE_INTERVAL_SECONDS = 10
TCP_KEEPALIVE_PROBES = 3

_HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_MONITORED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED | _HANDSHAKE_FAILED


class Link(StrEnum):
    """What the monitor of a socket tells."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    RETRIED = "retried"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """receive_high_water_mark in messages, sizes in bytes, times in seconds."""

    receive_high_water_mark: int
    max_message_bytes: int
    reconnect_min: float
    reconnect_max: float


class SubscriberSocket:
    """One SUB socket connected to one publisher, IPv4 or IPv6, re-dialled by ZMQ for as long as it is open.

    on_message gets the frames of each message, on_link what happens to the connection. Both run on the event loop.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        options: SocketOptions,
        on_message: Callable[[list[bytes]], None],
        on_link: Callable[[Link], None],
    ) -> None:
        self.endpoint = endpoint
        self._on_message = on_message
        self._on_link = on_link
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.SUB)
        self._monitor: zmq.Socket[bytes] | None = None
        self._reading = False
        self._closed = False
        self._redial_after = options.reconnect_max + REDIAL_MARGIN_SECONDS
        self._redial: asyncio.TimerHandle | None = None
        try:
            self._configure(options)
            self._monitor = self._socket.get_monitor_socket(int(_MONITORED))
            self._loop.add_reader(_descriptor(self._monitor), self._read_monitor)
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise
        self._read_monitor()

    def start(self) -> None:
        """Begin to read; until then messages wait in the socket."""
        if not self._reading and not self._closed:
            self._reading = True
            self._loop.add_reader(_descriptor(self._socket), self._read)
            self._loop.call_soon(self._read)

    def drain(self, limit: int) -> None:
        """Take what has arrived already, ``limit`` messages at most."""
        for _ in range(limit):
            if self._closed or not self._reading:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)

    def close(self) -> None:
        """Stop reading and let go of the connection. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._expect_redial(False)
        if self._reading:
            self._loop.remove_reader(_descriptor(self._socket))
        if self._monitor is not None:
            self._loop.remove_reader(_descriptor(self._monitor))
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _configure(self, options: SocketOptions) -> None:
        settings: dict[int, Any] = {
            zmq.IPV6: 1,
            zmq.RCVHWM: options.receive_high_water_mark,
            zmq.MAXMSGSIZE: options.max_message_bytes,
            zmq.RECONNECT_IVL: int(options.reconnect_min * 1000),
            zmq.RECONNECT_IVL_MAX: int(options.reconnect_max * 1000),
            zmq.LINGER: 0,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: TCP_KEEPALIVE_IDLE_SECONDS,
            zmq.TCP_KEEPALIVE_INTVL: TCP_KEEPALIVE_INTERVAL_SECONDS,
            zmq.TCP_KEEPALIVE_CNT: TCP_KEEPALIVE_PROBES,
            zmq.SUBSCRIBE: b"",
        }
        for option, value in settings.items():
            self._socket.setsockopt(option, value)

    def _read(self) -> None:
        if self._closed:
            return
        receive, handle = self._socket.recv_multipart, self._on_message
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            handle(frames)
            if self._closed:
                return  # type: ignore[unreachable]  # the handler may have closed this socket
        self._loop.call_soon(self._read)

    def _read_monitor(self) -> None:
        while self._monitor is not None and not self._closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = zmq.Event(zmq.utils.monitor.parse_monitor_message(frames)["event"])
            if event is zmq.Event.HANDSHAKE_SUCCEEDED:
                self._expect_redial(False)
                self._on_link(Link.CONNECTED)
            elif event is zmq.Event.DISCONNECTED:
                self._expect_redial(True)
                self._on_link(Link.DISCONNECTED)
            elif event is zmq.Event.CONNECT_RETRIED:
                self._expect_redial(False)
                self._on_link(Link.RETRIED)
            elif event & _HANDSHAKE_FAILED:
                self._on_link(Link.REFUSED)

    def _expect_redial(self, expected: bool) -> None:
        """ZMQ dials again by itself, except after what it takes for a breach of protocol (a frame above the limit)."""
        if self._redial is not None:
            self._redial.cancel()
            self._redial = None
        if expected and not self._closed:
            self._redial = self._loop.call_later(self._redial_after, self._dial_again)

    def _dial_again(self) -> None:
        self._redial = None
        if self._closed:
            return
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self.endpoint)
        self._socket.connect(self.endpoint)
        self._on_link(Link.RETRIED)


def _descriptor(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt(zmq.FD))
