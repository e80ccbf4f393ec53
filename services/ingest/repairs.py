"""Runs the replays that streams ask for: a few at a time, each on a socket of its own, beside the live sockets."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from schemas.wire.frames import ReplayMessage
from schemas.wire.types import WireError
from services.ingest.intake import Intake
from services.ingest.outcomes import Outcome
from services.ingest.repair import RepairPolicy, begin_round, due
from services.ingest.replay_socket import ReplaySocket
from services.ingest.zmq_sockets import SocketOptions

SCAN_SECONDS = 0.25


@dataclass(slots=True)
class Counts:
    """Replays since start: begun, ended by their end mark, ended without it, and those that could not even begin."""

    begun: int = 0
    complete: int = 0
    incomplete: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Replay:
    socket: ReplaySocket | None = None


class Repairs:
    """on_outcomes is told what became of messages; it also sends what is in the intake's buffer."""

    def __init__(
        self,
        context_of: Callable[[str], "zmq.Context[zmq.Socket[bytes]]"],
        options: SocketOptions,
        policy: RepairPolicy,
        timeout: float,
        max_replays: int,
        on_outcomes: Callable[[Intake, list[Outcome]], None],
    ) -> None:
        self.policy = policy
        self.counts = Counts()
        self._context_of = context_of
        self._options = options
        self._timeout = timeout
        self._max_replays = max_replays
        self._on_outcomes = on_outcomes
        self._running: dict[int, _Replay] = {}
        self._waiting: dict[int, Intake] = {}

    async def run(self, intakes: Callable[[], Iterable[Intake]]) -> None:
        """Look after every stream from time to time: repeated attempts, quiet publishers, room that came back."""
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            for intake in intakes():
                self.look_at(intake)

    def look_at(self, intake: Intake) -> None:
        """Begin or end this publisher's replay when its stream says so."""
        stream = intake.stream
        if stream.starved and intake.has_room_again:
            stream.room_again()
        running = self._running.get(id(intake))
        if running is not None and stream.round is None:
            self.end(intake)
            running = None
        if running is None and due(stream, time.time(), intake.last_received_at, self.policy):
            if len(self._running) < self._max_replays:
                self._begin(intake)
            else:
                self._waiting[id(intake)] = intake

    def end(self, intake: Intake) -> None:
        """Stop this publisher's replay (it is gone, or its stream has no more use for it)."""
        self._waiting.pop(id(intake), None)
        running = self._running.pop(id(intake), None)
        if running is not None and running.socket is not None:
            running.socket.close()
        self._next()

    def close(self) -> None:
        """Stop every replay, and begin none any more."""
        self._max_replays = 0
        self._waiting.clear()
        for running in self._running.values():
            if running.socket is not None:
                running.socket.close()
        self._running.clear()

    def _next(self) -> None:
        while self._waiting and len(self._running) < self._max_replays:
            intake = self._waiting.pop(next(iter(self._waiting)))
            if due(intake.stream, time.time(), intake.last_received_at, self.policy):
                self._begin(intake)

    def _begin(self, intake: Intake) -> None:
        self._waiting.pop(id(intake), None)
        endpoint = intake.publisher.replay_endpoint
        if endpoint is None:
            return
        self.counts.begun += 1
        start = begin_round(intake.stream)
        running = self._running[id(intake)] = _Replay()
        try:
            running.socket = ReplaySocket(
                self._context_of(endpoint),
                endpoint,
                self._options,
                start,
                self._timeout,
                lambda message: self._on_message(intake, message),
                lambda error: self._on_malformed(intake, error),
                lambda complete: self._on_end(intake, complete),
            )
        except zmq.ZMQError:
            self.counts.failed += 1
            self._on_end(intake, False)

    def _on_message(self, intake: Intake, message: ReplayMessage) -> bool:
        self._on_outcomes(intake, intake.handle_replayed(message, time.time()))
        return intake.stream.round is not None

    def _on_malformed(self, intake: Intake, error: WireError) -> None:
        self._on_outcomes(intake, intake.refuse_replayed(error))

    def _on_end(self, intake: Intake, complete: bool) -> None:
        self._running.pop(id(intake), None)
        if complete:
            self.counts.complete += 1
        else:
            self.counts.incomplete += 1
        self._on_outcomes(intake, intake.replay_ended(complete, time.time(), self.policy))
        self.look_at(intake)
        self._next()
