"""Follows ``kv.state.>`` on NATS."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from nats.aio.client import Client
from nats.aio.msg import Msg

from schemas.events import BodyError, StateNote, decode_state_note
from schemas.subjects import escape

CONNECT_TIMEOUT_SECONDS = 5
MAX_PENDING_NOTES = 10_000


def state_subjects(states: Sequence[str], model: str | None) -> list[str]:
    """NATS subjects to listen to; no states means all."""
    last = escape(model) if model else "*"
    return [f"kv.state.{state}.{last}" for state in states or ("*",)]


async def connect(url: str) -> Client:
    """Connect to a server, or to one of several separated by commas; later losses are ridden out.

    Raises TimeoutError, OSError, nats.errors.Error.
    """
    client = Client()

    async def ignore(_: Exception) -> None:
        """The client repeats the attempt by itself; the deadline below tells when that is in vain."""

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            servers = [server.strip() for server in url.split(",") if server.strip()]
            await client.connect(
                servers, name="kvroute-tap", connect_timeout=2, max_reconnect_attempts=-1, error_cb=ignore
            )
    except TimeoutError:
        await client.close()
        raise TimeoutError(f"no answer within {CONNECT_TIMEOUT_SECONDS} s") from None
    return client


async def state_notes(
    client: Client, states: Sequence[str], model: str | None
) -> AsyncGenerator[StateNote | BodyError, None]:
    """Notes as they come, for ever; a body that is not one comes as the error. Too slow a reader loses the newest."""
    notes: asyncio.Queue[StateNote | BodyError] = asyncio.Queue(MAX_PENDING_NOTES)

    async def receive(message: Msg) -> None:
        if notes.full():
            return
        try:
            notes.put_nowait(decode_state_note(message.data))
        except BodyError as error:
            notes.put_nowait(BodyError(f"{message.subject}: {error}"))

    for subject in state_subjects(states, model):
        await client.subscribe(subject, cb=receive)
    await client.flush()
    while True:
        yield await notes.get()
