"""Carries out controller messages one after another, behind the caller's back: a slow registry delays nobody."""

import asyncio
from collections import deque

from nats.errors import Error as NatsError

from services.coordinator.controller_events import ControllerEvent, EventKind
from services.runtime.logging import get_logger
from services.runtime.registrar import Registrar
from services.runtime.registration_rules import EndpointTakenError, KindTakenError
from services.runtime.tasks import end_tasks

MAX_WAITING = 1000
RETRY_SECONDS = 1.0
PAUSES = (EventKind.PAUSE, EventKind.RESUME)

log = get_logger("controller_updates")


class ControllerUpdates:
    """A queue of messages and the task that applies them. `applied`: how many were carried out so far."""

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._waiting: deque[ControllerEvent] = deque()
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.applied = 0

    def start(self) -> None:
        """Begin to carry out messages."""
        self._task = asyncio.create_task(self._run(), name="controller-updates")

    async def stop(self) -> None:
        """Stop; what waits is given up, the controller repeats the whole set when the coordinator is back."""
        if self._task is not None:
            await end_tasks([self._task])

    @property
    def waiting(self) -> int:
        """Messages not yet carried out."""
        return len(self._waiting)

    def accept(self, event: ControllerEvent) -> bool:
        """Take a message; False when too many wait. A complete set makes earlier additions and removals idle."""
        if event.kind is EventKind.SET and self._waiting:
            first, *later = self._waiting
            self._waiting = deque([first, *(waiting for waiting in later if waiting.kind in PAUSES)])
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append(event)
        self._something.set()
        return True

    async def _run(self) -> None:
        while True:
            while not self._waiting:
                self._something.clear()
                await self._something.wait()
            event = self._waiting[0]
            try:
                await self._apply(event)
            except (NatsError, TimeoutError) as error:
                log.warning("controller_update_waits", error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except Exception:
                log.exception("controller_update_failed", kind=event.kind)
            self._waiting.popleft()
            self.applied += 1

    async def _apply(self, event: ControllerEvent) -> None:
        if event.kind is EventKind.DEL:
            for instance_id in event.named:
                await self._registrar.remove(instance_id)
            return
        if event.kind in PAUSES:
            for instance_id in event.named:
                await self._registrar.set_paused(instance_id, event.kind is EventKind.PAUSE)
            return
        await self._remove_what_is_gone(event)
        for records in event.engines.values():
            for record in records:
                try:
                    await self._registrar.put(record)
                except (EndpointTakenError, KindTakenError) as error:
                    log.warning("controller_instance_refused", instance_id=record.instance_id, error=str(error))
        log.info(
            "controller_update", kind=event.kind, instances=len(event.engines), refused=len(event.refused),
            not_targets=len(event.not_targets),
        )  # fmt: skip

    async def _remove_what_is_gone(self, event: ControllerEvent) -> None:
        """Instances that a complete set does not name, and ranks that a named instance no longer has."""
        ours = [
            record for record in (await self._registrar.fresh_view()).engines.values() if record.origin == "controller"
        ]
        listed = {(record.instance_id, record.dp_rank) for records in event.engines.values() for record in records}
        for record in ours:
            instance_gone = event.kind is EventKind.SET and record.instance_id not in event.named
            rank_gone = record.instance_id in event.engines and (record.instance_id, record.dp_rank) not in listed
            if instance_gone or rank_gone:
                await self._registrar.remove(record.instance_id, [record.dp_rank])
