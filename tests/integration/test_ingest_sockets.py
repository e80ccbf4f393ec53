"""SUB sockets on the event loop against real PUB sockets."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import zmq

from services.ingest.zmq_sockets import MESSAGES_PER_TURN, Link, SocketOptions, SubscriberSocket
from tests.conftest import free_port

OPTIONS = SocketOptions(
    receive_high_water_mark=100_000, max_message_bytes=1_000_000, reconnect_min=0.02, reconnect_max=0.1
)


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        await asyncio.sleep(0.005)


class Listener:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.messages: list[list[bytes]] = []
        self.links: list[Link] = []
        self.socket = SubscriberSocket(context, endpoint, OPTIONS, self.messages.append, self.links.append)
        self.socket.start()

    @property
    def connected(self) -> bool:
        changes = [link for link in self.links if link in (Link.CONNECTED, Link.DISCONNECTED)]
        return changes[-1:] == [Link.CONNECTED]


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def listen(context: "zmq.Context[zmq.Socket[bytes]]") -> AsyncIterator[Callable[[str], Listener]]:
    listeners: list[Listener] = []

    def open_listener(endpoint: str) -> Listener:
        listeners.append(Listener(context, endpoint))
        return listeners[-1]

    yield open_listener
    for listener in listeners:
        listener.socket.close()


def publish_on(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.IPV6, 1)
    publisher.setsockopt(zmq.SNDHWM, 100_000)
    publisher.setsockopt(zmq.LINGER, 0)
    publisher.bind(endpoint)
    return publisher


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")),
        "localhost",
    ],
)
async def test_ip_02_every_address_family_is_heard(
    context: "zmq.Context[zmq.Socket[bytes]]", listen: Callable[[str], Listener], host: str
) -> None:
    port = free_port()
    publisher = publish_on(context, f"tcp://{host if host != 'localhost' else '127.0.0.1'}:{port}")
    listener = listen(f"tcp://{host}:{port}")
    await until(lambda: listener.connected, "connection")

    def heard() -> bool:
        # A connection may be up before the publisher knows of the subscription, so it is said again until heard.
        publisher.send_multipart([b"kv", b"\0" * 8, b"x"])
        return [b"kv", b"\0" * 8, b"x"] in listener.messages

    await until(heard, "message")


async def test_a_burst_is_read_to_the_end_in_order_while_the_loop_goes_on(
    context: "zmq.Context[zmq.Socket[bytes]]", listen: Callable[[str], Listener]
) -> None:
    port = free_port()
    publisher = publish_on(context, f"tcp://127.0.0.1:{port}")
    listener = listen(f"tcp://127.0.0.1:{port}")
    await until(lambda: listener.connected, "connection")
    count = MESSAGES_PER_TURN * 50
    for number in range(count):
        publisher.send_multipart([b"", number.to_bytes(8, "big"), b"x" * 100])
    turns = 0
    while len(listener.messages) < count:
        turns += 1
        await asyncio.sleep(0)
        assert turns < 1_000_000
    assert [int.from_bytes(frames[1], "big") for frames in listener.messages] == list(range(count))
    publisher.send_multipart([b"", b"\xff" * 8, b"later"])
    await until(lambda: len(listener.messages) == count + 1, "a message after the burst")


async def test_sq_07_a_publisher_that_starts_later_or_comes_back_is_heard(
    context: "zmq.Context[zmq.Socket[bytes]]", listen: Callable[[str], Listener]
) -> None:
    port = free_port()
    listener = listen(f"tcp://127.0.0.1:{port}")
    await until(lambda: Link.RETRIED in listener.links, "a failed attempt to connect")
    assert not listener.connected
    for life in range(2):
        publisher = publish_on(context, f"tcp://127.0.0.1:{port}")
        await until(lambda: listener.connected, "connection")
        publisher.send_multipart([b"", bytes(8), b"%d" % life])
        await until(lambda: len(listener.messages) > life, "message")  # noqa: B023
        publisher.close(linger=0)
        await until(lambda: not listener.connected, "notice of the loss")
    assert [frames[2] for frames in listener.messages] == [b"0", b"1"]


async def test_a_frame_above_the_limit_costs_a_reconnect_and_no_more(
    context: "zmq.Context[zmq.Socket[bytes]]", listen: Callable[[str], Listener]
) -> None:
    port = free_port()
    publisher = publish_on(context, f"tcp://127.0.0.1:{port}")
    listener = listen(f"tcp://127.0.0.1:{port}")
    await until(lambda: listener.connected, "connection")
    publisher.send_multipart([b"", bytes(8), b"x" * 2_000_000])
    await until(lambda: Link.DISCONNECTED in listener.links, "disconnection")
    await until(lambda: listener.connected, "connection again")
    publisher.send_multipart([b"", bytes(8), b"small"])
    await until(lambda: len(listener.messages) == 1, "the next message")
    assert listener.messages[0][2] == b"small"


async def test_messages_wait_until_reading_starts(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    port = free_port()
    publisher = publish_on(context, f"tcp://127.0.0.1:{port}")
    messages: list[list[bytes]] = []
    links: list[Link] = []
    subscriber = SubscriberSocket(context, f"tcp://127.0.0.1:{port}", OPTIONS, messages.append, links.append)
    await until(lambda: Link.CONNECTED in links, "connection")
    publisher.send_multipart([b"", bytes(8), b"early"])
    await asyncio.sleep(0.1)
    assert messages == []
    subscriber.start()
    await until(lambda: len(messages) == 1, "the waiting message")
    subscriber.close()
    subscriber.close()


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1", "nonsense", "http://10.0.0.1:1"])
async def test_ip_03_an_address_that_cannot_be_connected_to_is_an_error_at_once(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str
) -> None:
    with pytest.raises(zmq.ZMQError):
        SubscriberSocket(context, endpoint, OPTIONS, lambda frames: None, lambda link: None)


async def test_an_idle_socket_costs_no_processor_time(
    context: "zmq.Context[zmq.Socket[bytes]]", listen: Callable[[str], Listener]
) -> None:
    port = free_port()
    publisher = publish_on(context, f"tcp://127.0.0.1:{port}")
    listener = listen(f"tcp://127.0.0.1:{port}")
    await until(lambda: listener.connected, "connection")
    publisher.send_multipart([b"", bytes(8), b"x"])
    await until(lambda: len(listener.messages) == 1, "message")
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.1
