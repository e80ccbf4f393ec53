"""Messages that cannot be handled, kept for inspection in the stream KV_DEAD (bounded) with their origin and reason.

They are never tried again: what could not be read once cannot be read the next time.
"""

import contextlib

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

REASON_HEADER = "kvroute-reason"
SUBJECT_HEADER = "kvroute-subject"
SEQUENCE_HEADER = "kvroute-sequence"
MAX_REASON = 300


async def put_aside(nc: Client, service: str, message: Msg, reason: str) -> None:
    """Keep a message under ``kv.dead.<service>``. While NATS is away it is not kept: the stream still has it."""
    text = " ".join(reason.split()).encode("ascii", "replace").decode()[:MAX_REASON]
    headers = {REASON_HEADER: text or "unknown", SUBJECT_HEADER: message.subject}
    with contextlib.suppress(Exception):
        headers[SEQUENCE_HEADER] = str(message.metadata.sequence.stream)
    with contextlib.suppress(NatsError, OSError):
        await nc.publish(f"kv.dead.{service}", message.data, headers=headers)
