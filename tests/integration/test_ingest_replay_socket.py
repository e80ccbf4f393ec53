"""Replays over real sockets: every shape that releases of vLLM have sent, cut ones, malformed ones, endless silence."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq
import zmq.asyncio

from schemas.wire.frames import ReplayMessage
from schemas.wire.types import WireError
from services.ingest.replay_socket import ReplaySocket
from services.ingest.zmq_sockets import SocketOptions
from tests.captures import publisher_capture, publisher_capture_names

OPTIONS = SocketOptions(100_000, 1_000_000, 0.02, 0.1)
END = [b"", b"", b"\xff" * 8, b""]


def reply(seq: int) -> list[bytes]:
    return [b"", b"kv-events", seq.to_bytes(8, "big"), b"payload"]


@dataclass
class Answer:
    """What a replay brought."""

    numbers: list[int] = field(default_factory=list)
    malformed: list[WireError] = field(default_factory=list)
    ended: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def take(self, message: ReplayMessage) -> bool:
        self.numbers.append(message.seq)
        return True


class Router:
    """A ROUTER that answers each question with given messages, and keeps the questions."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.answers: list[Sequence[list[bytes]]] = []
        self.questions: list[int] = []
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, _, start = await self.socket.recv_multipart()
            self.questions.append(int.from_bytes(start, "big"))
            for frames in self.answers.pop(0) if self.answers else ():
                await self.socket.send_multipart([client, *frames])

    def close(self) -> None:
        self._task.cancel()
        self.socket.close(linger=0)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    context = zmq.asyncio.Context()
    router = Router(context)
    yield router
    router.close()
    context.destroy(linger=0)


Ask = Callable[..., Answer]


@pytest.fixture
async def ask(router: Router) -> AsyncIterator[Ask]:
    context: zmq.Context[Any] = zmq.Context()
    sockets = []

    def begin(start: int = 0, timeout: float = 0.3, answer: Answer | None = None, on: Any = None) -> Answer:
        answer = answer or Answer()
        sockets.append(
            ReplaySocket(
                context,
                router.endpoint,
                OPTIONS,
                start,
                timeout,
                on or answer.take,
                answer.malformed.append,
                answer.ended.set_result,
            )
        )
        return answer

    yield begin
    for socket in sockets:
        socket.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("name", publisher_capture_names())
async def test_t07_the_replay_of_every_release_is_read_to_its_end(name: str, router: Router, ask: Ask) -> None:
    for session in publisher_capture(name)["sessions"]:
        for replay in session["replays"]:
            messages = [[bytes.fromhex(frame) for frame in frames] for frames in replay["reply_messages_hex"]]
            if replay["client_socket"] != "DEALER" or not messages:
                continue
            router.answers.append(messages)
            answer = ask(replay["start_seq"])
            assert await asyncio.wait_for(answer.ended, 5) is True
            assert router.questions[-1] == replay["start_seq"]
            assert answer.numbers == [int.from_bytes(frames[-2], "big") for frames in messages[:-1]]
            assert answer.malformed == []


async def test_sq_04_all_parts_are_taken_in_order_and_the_next_question_meets_no_leftovers(
    router: Router, ask: Ask
) -> None:
    router.answers += [[reply(4), reply(5), reply(6), END, reply(7)], [reply(9), END]]
    first = ask(4)
    assert await asyncio.wait_for(first.ended, 5) is True
    assert first.numbers == [4, 5, 6]
    second = ask(9)
    assert await asyncio.wait_for(second.ended, 5) is True
    assert second.numbers == [9]
    assert router.questions == [4, 9]


async def test_sq_04_a_malformed_part_ends_the_replay_and_a_new_socket_asks_again(router: Router, ask: Ask) -> None:
    router.answers += [[reply(4), [b"", b"kv", b"short", b"payload"], reply(5), END], [reply(5), END]]
    first = ask(4)
    assert await asyncio.wait_for(first.ended, 5) is False
    assert (first.numbers, len(first.malformed)) == ([4], 1)
    second = ask(5)
    assert await asyncio.wait_for(second.ended, 5) is True
    assert second.numbers == [5]


async def test_t08_a_replay_that_stops_in_silence_is_over_after_the_time_without_progress(
    router: Router, ask: Ask
) -> None:
    router.answers.append([reply(1), reply(2)])
    began = time.monotonic()
    answer = ask(1, timeout=0.2)
    assert await asyncio.wait_for(answer.ended, 5) is False
    assert answer.numbers == [1, 2]
    assert 0.2 <= time.monotonic() - began < 2


async def test_an_endpoint_where_nobody_listens_is_given_up(ask: Ask, router: Router) -> None:
    router.close()
    answer = ask(timeout=0.2)
    assert await asyncio.wait_for(answer.ended, 5) is False


async def test_sq_08_ten_thousand_messages_are_drained_at_once_and_none_is_lost(router: Router, ask: Ask) -> None:
    router.answers.append([*(reply(seq) for seq in range(10_000)), END])
    answer = ask(timeout=5.0)
    assert await asyncio.wait_for(answer.ended, 20) is True
    assert answer.numbers == list(range(10_000))


async def test_who_has_had_enough_is_told_that_the_replay_is_over(router: Router, ask: Ask) -> None:
    router.answers.append([*(reply(seq) for seq in range(10)), END])
    answer = Answer()

    def two(message: ReplayMessage) -> bool:
        answer.numbers.append(message.seq)
        return len(answer.numbers) < 2

    ask(answer=answer, on=two)
    assert await asyncio.wait_for(answer.ended, 5) is False
    assert answer.numbers == [0, 1]
