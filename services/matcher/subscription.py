"""The FastStream side: a batch pull subscriber on the durable consumer of KV_EVENTS, with raw messages.

The consumer is made anew whenever a replica becomes active, at the first message that is not known to be done:
JetStream would otherwise mix redelivered and new messages, and order within a publisher would be lost.
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from faststream import AckPolicy
from faststream.nats import NatsBroker, PullSub
from faststream.nats.message import NatsMessage
from faststream.security import BaseSecurity, SASLPlaintext
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy as ConsumerAckPolicy
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from schemas.subjects import EVENTS_ALL, EVENTS_STREAM, MATCHER_CONSUMER
from services.matcher.standing_pull import StandingPull
from services.runtime.broker import connection_options
from services.runtime.settings import NatsSettings

ACK_WAIT_SECONDS = 60.0
TITLE = "kv.events"
DESCRIPTION = "Canonical event batches (schemas.events.EventBatch, msgpack) of every engine rank and pool"

LINGER_SECONDS = 0.002

OnBatch = Callable[[list[Msg]], Awaitable[None]]


def make_broker(settings: NatsSettings, name: str) -> NatsBroker:
    """A FastStream broker for the configured server, not connected yet; bodies stay raw."""
    options = connection_options(settings, name)
    user, password, tls = options.pop("user", None), options.pop("password", None), options.pop("tls", None)
    security: BaseSecurity | None = None
    if user is not None:
        security = SASLPlaintext(username=user, password=password or "", ssl_context=tls)
    elif tls is not None:
        security = BaseSecurity(ssl_context=tls)
    # The batch at work is waited for by the one who started it (leadership), not once more by the broker.
    return NatsBroker(**options, security=security, apply_types=False, logger=None, graceful_timeout=0.1)


async def stop_broker(broker: NatsBroker) -> None:
    """Close the connection of a started broker, whose subscribers have ended.

    Its own stop drains, which waits for a frozen server longer than any grace time.
    """
    connection = await broker.connect()
    await connection.close()


async def start_sequence(js: JetStreamContext, position: int | None) -> int:
    """Where to begin: behind what is known to be done, else behind what the durable consumer has acknowledged."""
    if position is not None:
        return position + 1
    with contextlib.suppress(NotFoundError):
        info = await js.consumer_info(EVENTS_STREAM, MATCHER_CONSUMER)
        if info.ack_floor is not None:
            return int(info.ack_floor.stream_seq) + 1
    return 1


async def recreate_consumer(js: JetStreamContext, first_sequence: int) -> ConsumerConfig:
    """The durable consumer, beginning at a stream sequence. Raises nats.errors.Error."""
    with contextlib.suppress(NotFoundError):
        await js.delete_consumer(EVENTS_STREAM, MATCHER_CONSUMER)
    config = ConsumerConfig(
        durable_name=MATCHER_CONSUMER,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first_sequence,
        ack_policy=ConsumerAckPolicy.ALL,
        ack_wait=ACK_WAIT_SECONDS,
        max_ack_pending=-1,
        filter_subject=EVENTS_ALL,
    )
    await js.add_consumer(EVENTS_STREAM, config)
    return config


async def _raw(message: NatsMessage) -> Any:
    return message.raw_message


def make_subscriber(broker: NatsBroker, on_batch: OnBatch, batch_size: int) -> Any:
    """A subscriber that is not started yet; its handler gets lists of nats.aio.msg.Msg and acknowledges itself."""
    subscriber = broker.subscriber(
        EVENTS_ALL,
        stream=EVENTS_STREAM,
        durable=MATCHER_CONSUMER,
        pull_sub=PullSub(batch_size=batch_size, timeout=LINGER_SECONDS, batch=True),
        ack_policy=AckPolicy.MANUAL,
        decoder=_raw,
        persistent=False,
        title=TITLE,
        description=DESCRIPTION,
    )
    subscriber(on_batch)
    return subscriber


async def start_subscriber(subscriber: Any, batch_size: int) -> None:
    """Start it on the existing consumer, fetching through a standing pull."""
    pull = StandingPull(subscriber.connection, EVENTS_STREAM, MATCHER_CONSUMER, batch_size)
    await pull.start()
    await subscriber.start()
    # Its task has not run yet: nothing has been asked through the subscription that is replaced.
    fetching, subscriber.subscription = subscriber.subscription, pull
    await fetching.unsubscribe()


def sequence_of(message: Msg) -> int:
    """A message's place in its stream, from the reply subject of its delivery (without parsing the rest)."""
    tokens = message.reply.split(".")
    return int(tokens[5] if len(tokens) == 9 else tokens[7])


async def is_missing(js: JetStreamContext, first: int, last: int) -> bool:
    """Whether the stream still has a message of these sequences: then it was delivered and lost on the way."""
    try:
        found = await js.get_msg(EVENTS_STREAM, seq=first, subject=EVENTS_ALL, next=True)
    except NotFoundError:
        return False
    return found.seq is not None and found.seq <= last
