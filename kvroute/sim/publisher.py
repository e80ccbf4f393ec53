"""A vLLM-style event publisher: PUB with three frames, and a ROUTER that replays what a ring buffer still has."""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

END_OF_REPLAY = b"\xff" * 8
DEFAULT_TOPIC = b"kv-events"
DEFAULT_BUFFER_STEPS = 10_000
SUBSCRIPTION_POLL_SECONDS = 0.01
REBIND_SECONDS = 0.02

Frames = tuple[bytes, bytes, bytes]
WireFilter = Callable[[Frames], Iterable[Frames]]


def send_unchanged(frames: Frames) -> Iterable[Frames]:
    """The wire filter of a healthy publisher; another one may drop, repeat, delay or spoil messages."""
    return (frames,)


@dataclass(frozen=True)
class ReplayManner:
    """How replays are answered. limit: messages after which one stops in silence; loss: probability per message."""

    answers: bool = True
    topic: bool = True
    end: bool = True
    limit: int | None = None
    loss: float = 0.0


GOOD_MANNERS = ReplayManner()


class EventPublisher:
    """One DP rank's PUB and ROUTER sockets. The ring buffer keeps what was published, not what the filter let through.

    endpoint / replay_endpoint: tcp://host:port to bind; port 0 takes a free one, ``endpoint`` then tells which.
    sequence: the next number. last_sent: the number of what went onto the wire last.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: bytes = DEFAULT_TOPIC,
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
        wire_filter: WireFilter = send_unchanged,
        replay_manner: ReplayManner = GOOD_MANNERS,
    ) -> None:
        self._context = context
        self._chance = random.Random(1)
        self.replay_manner = replay_manner
        self.topic = topic
        self.wire_filter = wire_filter
        self.sequence = 0
        self.last_sent: int | None = None
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._subscribed = False
        self._pub = self._bind_pub(endpoint)
        self.endpoint = _address(self._pub)
        self._router: zmq.asyncio.Socket | None = None
        self.replay_endpoint: str | None = None
        self._replay_task: asyncio.Task[None] | None = None
        if replay_endpoint:
            try:
                self._router = self._bind_router(replay_endpoint)
            except OSError:
                self._pub.close(linger=0)
                raise
            self.replay_endpoint = _address(self._router)
            self._replay_task = asyncio.create_task(self._serve_replay(self._router))

    def publish(self, payload: bytes) -> int:
        """Send a batch under the next sequence number, which is returned."""
        sequence = self.sequence
        self.sequence += 1
        self._buffer.append((sequence, payload))
        for frames in self.wire_filter((self.topic, sequence.to_bytes(8, "big"), payload)):
            self.send(frames)
        return sequence

    def remember(self, payload: bytes) -> None:
        """Publish a batch that nobody hears live: only the replay buffer has it."""
        self._buffer.append((self.sequence, payload))
        self.sequence += 1

    def consume(self) -> None:
        """Use a number for a batch that cannot be sent: it is in no buffer either."""
        self.sequence += 1

    def send(self, frames: Sequence[bytes]) -> None:
        """Put frames on the wire as they are; nobody remembers them."""
        if self._pub.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            if len(frames) == 3 and len(frames[1]) == 8:
                self.last_sent = int.from_bytes(frames[1], "big")

    async def subscribed(self) -> None:
        """Return once somebody has subscribed: what is published before is lost to a late joiner."""
        while not self._subscribed:
            try:
                self._subscribed = self._pub.recv(zmq.NOBLOCK).startswith(b"\x01")
            except zmq.Again:
                await asyncio.sleep(SUBSCRIPTION_POLL_SECONDS)

    def restart(self) -> None:
        """Start a new life as a restarted process does: sequence from 0, nothing to replay."""
        self.sequence = 0
        self.last_sent = None
        self._buffer.clear()

    async def reopen(self, pause: float = 0.0) -> None:
        """Break every connection, as the end of a process does, and listen on the same ports again after a pause."""
        await self._close_sockets(linger=0)
        await asyncio.sleep(pause)
        self._subscribed = False
        while True:
            with contextlib.suppress(OSError):
                self._pub = self._bind_pub(self.endpoint)
                break
            await asyncio.sleep(REBIND_SECONDS)
        while self.replay_endpoint:
            with contextlib.suppress(OSError):
                self._router = self._bind_router(self.replay_endpoint)
                self._replay_task = asyncio.create_task(self._serve_replay(self._router))
                break
            await asyncio.sleep(REBIND_SECONDS)

    async def close(self) -> None:
        """Stop replaying and release both ports."""
        await self._close_sockets(linger=100)

    async def _close_sockets(self, linger: int) -> None:
        if self._replay_task:
            self._replay_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replay_task
        if self._router:
            self._router.close(linger=0)
        self._pub.close(linger=linger)

    def _bind_pub(self, endpoint: str) -> "zmq.Socket[bytes]":
        # XPUB is PUB on the wire; it also tells when somebody subscribes.
        # A plain socket of the same context, which then closes it with all the others.
        make: Any = self._context.socket
        socket: zmq.Socket[bytes] = make(zmq.XPUB, socket_class=zmq.Socket)
        _bind(socket, endpoint)
        return socket

    def _bind_router(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        _bind(socket, endpoint)
        return socket

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            request = await router.recv_multipart()
            if len(request) != 3 or request[1] != b"" or len(request[2]) != 8:
                continue
            manner = self.replay_manner
            if not manner.answers:
                continue
            client, start = request[0], int.from_bytes(request[2], "big")
            topic = (self.topic,) if manner.topic else ()
            wanted = [message for message in self._buffer if message[0] >= start]
            for position, (sequence, payload) in enumerate(wanted[: manner.limit]):
                if not (manner.loss and position and self._chance.random() < manner.loss):
                    await router.send_multipart((client, b"", *topic, sequence.to_bytes(8, "big"), payload))
            if manner.end:
                await router.send_multipart((client, b"", *([b""] if manner.topic else []), END_OF_REPLAY, b""))


def _bind(socket: "zmq.Socket[Any]", endpoint: str) -> None:
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(f"cannot bind {endpoint}: {error}") from error


def _address(socket: "zmq.Socket[Any]") -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
