"""A pull that stands at the server: messages come at once, many together when many are there, and nothing polls.

FastStream's batch subscriber fetches through nats-py, which either waits until a batch is full or its time is over, or,
with short times, asks some hundred times a second and leaves requests behind that swallow deliveries. This object takes
the place of the fetching subscription: one request for a whole batch is always open, what it brings is collected, and
`fetch` hands over what is there.
"""

import asyncio
import json
import time
from collections import deque

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NothingYetError

EXPIRES_SECONDS = 30.0
CHECK_SECONDS = 1.0
REFUSED_SECONDS = 0.5
MAX_BYTES = 16 * 1024 * 1024
NANOSECONDS = 1_000_000_000
_TIMED_OUT = frozenset({"404", "408"})


class StandingPull:
    """Messages of one durable consumer. For one reader."""

    def __init__(self, nc: Client, stream: str, consumer: str, batch_size: int) -> None:
        self._nc = nc
        self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = nc.new_inbox()
        self._batch_size = batch_size
        self._arrived: deque[Msg] = deque()
        self._awake = asyncio.Event()
        self._requests = 0
        self._open = 0
        self._asked_at = 0.0
        self._not_before = 0.0
        self._reconnects = -1
        self._subscription: object = None

    async def start(self) -> None:
        """Begin to listen; the first `fetch` asks."""
        self._subscription = await self._nc.subscribe(
            f"{self._inbox}.*", cb=self._take, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def fetch(self, batch: int = 1, timeout: float | None = None, heartbeat: float | None = None) -> list[Msg]:
        """At most `batch` messages. Whoever wants a whole batch has none yet: the first one is waited for.

        With less wanted, some are there already: more are waited for `timeout` seconds.
        Raises nats.errors.TimeoutError.
        """
        patient = batch >= self._batch_size
        ends = time.monotonic() + (timeout or 0.0)
        while not self._arrived:
            await self._ask()
            self._awake.clear()
            left = CHECK_SECONDS if patient else ends - time.monotonic()
            if left <= 0:
                raise NothingYetError
            try:
                await asyncio.wait_for(self._awake.wait(), left)
            except TimeoutError:
                if not patient:
                    raise NothingYetError from None
        taken = [self._arrived.popleft() for _ in range(min(batch, len(self._arrived)))]
        await self._ask()
        return taken

    async def unsubscribe(self) -> None:
        """Stop listening; what was delivered and not fetched stays unacknowledged."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()  # type: ignore[attr-defined]

    async def _take(self, message: Msg) -> None:
        status = message.headers.get("Status") if message.headers and not message.data else None
        if status is None:
            self._arrived.append(message)
            self._open -= 1
        elif message.subject != self._reply:
            return  # the end of a request that has been counted as over already
        else:
            if status not in _TIMED_OUT and self._open == self._batch_size:
                # No such consumer, or no server that could answer: whoever watches the stream sees to it.
                self._not_before = time.monotonic() + REFUSED_SECONDS
            self._open = 0
        self._awake.set()

    @property
    def _reply(self) -> str:
        return f"{self._inbox}.{self._requests}"

    async def _ask(self) -> None:
        """Open a request when none is, or when it went down with its connection; a full buffer asks for nothing."""
        now = time.monotonic()
        reconnects = int(self._nc.stats["reconnects"])
        if reconnects != self._reconnects or now - self._asked_at > EXPIRES_SECONDS + CHECK_SECONDS:
            self._open = 0
        if self._open > 0 or now < self._not_before or len(self._arrived) >= self._batch_size:
            return
        if not self._nc.is_connected:
            return
        self._reconnects, self._asked_at, self._open = reconnects, now, self._batch_size
        self._requests += 1
        request = {
            "batch": self._batch_size,
            "expires": int(EXPIRES_SECONDS * NANOSECONDS),
            "max_bytes": max(MAX_BYTES, 2 * self._nc.max_payload),
        }
        await self._nc.publish(self._request_subject, json.dumps(request).encode(), self._reply)
