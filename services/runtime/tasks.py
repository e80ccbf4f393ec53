"""Ending tasks for certain."""

import asyncio
from collections.abc import Iterable

AGAIN_SECONDS = 0.2


async def end_tasks(tasks: Iterable["asyncio.Task[object]"]) -> list[object]:
    """Cancel until every task has ended; what they returned or raised, in order.

    Once is not enough: asyncio.wait_for (Python 3.11; nats-py is built on it) swallows a cancellation that meets a
    result, redis-py's client that of a command now and then, and the task goes on as if nothing had been asked of it.
    """
    ending = list(tasks)
    pending = {task for task in ending if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_SECONDS)
    return [None if task.cancelled() else task.exception() or task.result() for task in ending]
