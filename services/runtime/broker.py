"""The connection to NATS and the streams on it: waits for the server, says so, reconnects for ever."""

import asyncio
import random
import ssl
from typing import Any

from nats.aio.client import Client, Server
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError, BucketNotFoundError, NotFoundError

from schemas.subjects import (
    CURSORS_BUCKET,
    DEAD_ALL,
    DEAD_STREAM,
    EVENTS_ALL,
    EVENTS_STREAM,
    INDEX_ALL,
    INDEX_STREAM,
    LEASE_BUCKET,
    LIVENESS_BUCKET,
    REGISTRY_BUCKET,
    SNAPSHOT_BUCKET,
    STREAMS_BUCKET,
)
from services.runtime.health import Health
from services.runtime.logging import RateLimited, get_logger, masked
from services.runtime.settings import NatsSettings

FIRST_WAIT_SECONDS = 0.1
LONGEST_WAIT_SECONDS = 5.0
REPORT_SECONDS = 30.0
PING_SECONDS = 15
PENDING_BYTES = 32 * 1024 * 1024
KV_BUCKETS = (REGISTRY_BUCKET, LEASE_BUCKET, LIVENESS_BUCKET)

__all__ = ["connect_nats", "connection_options", "ensure_streams", "masked"]

log = get_logger("broker")


async def connect_nats(settings: NatsSettings, name: str, health: Health | None = None) -> Client:
    """A connected client; waits for the server with growing, jittered pauses. Later losses are ridden out for ever.

    Raises ValueError for a URL that can never work.
    """
    where = ", ".join(masked(url) for url in settings.servers())
    if not settings.servers():
        raise ValueError("nats.url is empty; give at least one server, for example nats://127.0.0.1:4222")
    client = Client()
    last_error = ""
    reports = RateLimited(REPORT_SECONDS)

    def report(ok: bool, reason: str = "") -> None:
        if health is not None:
            health.set("nats", ok, reason)

    async def disconnected() -> None:
        if not client.is_closed:
            report(False, f"connection to NATS at {where} is lost, reconnecting")
            log.warning("nats_disconnected", server=where)

    async def reconnected() -> None:
        report(True)
        log.info("nats_reconnected", server=where)

    async def closed() -> None:
        # The client gives up for good when the server refuses it (expired credentials, a limit): a new process tries.
        if client.last_error is not None and health is not None and not health.stopping:
            health.fail(f"NATS at {where} closed the connection: {client.last_error}")

    async def failed(error: Exception) -> None:
        nonlocal last_error
        last_error = str(error) or type(error).__name__
        log.debug("nats_error", error=last_error)

    options = connection_options(settings, name) | {
        # Left to itself, the client would dial for ever without a word; this way it comes back after two attempts.
        "max_reconnect_attempts": 1,
        "reconnect_to_server_handler": _next_dial,
        "disconnected_cb": disconnected,
        "closed_cb": closed,
        "reconnected_cb": reconnected,
        "error_cb": failed,
    }
    report(False, f"waiting for NATS at {where}")
    wait = FIRST_WAIT_SECONDS
    while True:
        client = Client()
        try:
            await client.connect(**options)
        except (OSError, NatsError, TimeoutError) as error:
            reason = last_error or str(error) or type(error).__name__
            if reports.allow(reason) is not None:
                log.warning("waiting_for_nats", server=where, error=reason)
            report(False, f"waiting for NATS at {where}: {reason}")
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(LONGEST_WAIT_SECONDS, wait * 2)
            continue
        client.options["max_reconnect_attempts"] = -1
        report(True)
        log.info("nats_connected", server=where)
        return client


def _next_dial(servers: list[Server], information: dict[str, Any]) -> tuple[Server, float]:
    """After a loss: the server tried least, after a pause that grows and differs between processes."""
    server = min(servers, key=lambda candidate: candidate.reconnects)
    wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(server.reconnects, 10))
    return server, wait * random.uniform(0.5, 1.0)


def connection_options(settings: NatsSettings, name: str) -> dict[str, Any]:
    """How to connect, as keyword arguments of nats.connect (FastStream's broker takes the same)."""
    values: dict[str, Any] = {
        "servers": settings.servers(),
        "name": name,
        "connect_timeout": settings.connect_timeout,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": random.uniform(0.2, 0.4),
        # A server that hangs without closing its connections is given up after two unanswered pings.
        "ping_interval": PING_SECONDS,
        "max_outstanding_pings": 2,
        "pending_size": PENDING_BYTES,
    }
    if settings.user is not None:
        values["user"] = settings.user
    if settings.password is not None:
        values["password"] = settings.password.get_secret_value()
    if settings.token is not None:
        values["token"] = settings.token.get_secret_value()
    if settings.credentials_file:
        values["user_credentials"] = settings.credentials_file
    if settings.tls_ca_file:
        values["tls"] = ssl.create_default_context(cafile=settings.tls_ca_file)
    return values


async def ensure_streams(js: JetStreamContext, settings: NatsSettings) -> None:
    """Create or bring up to date the streams, the KV buckets and the snapshot store; waits for JetStream."""
    wait = FIRST_WAIT_SECONDS
    while True:
        try:
            for stream, subject in ((EVENTS_STREAM, EVENTS_ALL), (INDEX_STREAM, INDEX_ALL), (DEAD_STREAM, DEAD_ALL)):
                await _ensure_stream(js, _stream_config(settings, stream, subject))
            for bucket in KV_BUCKETS:
                await _ensure_bucket(js, settings, bucket)
            await _ensure_snapshots(js, settings)
            await _ensure_stream_states(js, settings)
        except (NatsError, TimeoutError) as error:
            log.info("waiting_for_jetstream", error=str(error) or type(error).__name__)
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(LONGEST_WAIT_SECONDS, wait * 2)
        else:
            return


def _storage(settings: NatsSettings) -> StorageType:
    return StorageType.FILE if settings.storage == "file" else StorageType.MEMORY


def _stream_config(settings: NatsSettings, stream: str, subject: str) -> StreamConfig:
    return StreamConfig(
        name=stream,
        subjects=[subject],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=_storage(settings),
        max_age=settings.stream_max_age,
        max_bytes=settings.stream_max_bytes if stream != DEAD_STREAM else min(settings.stream_max_bytes, 64 * 1024**2),
        duplicate_window=min(settings.duplicate_window, settings.stream_max_age),
        num_replicas=settings.replicas,
        allow_direct=True,
    )


async def _ensure_stream(js: JetStreamContext, config: StreamConfig) -> None:
    try:
        await js.add_stream(config)
    except BadRequestError:
        # It exists with other settings: another release or an operator's change of limits.
        await js.update_stream(config)


async def _ensure_bucket(js: JetStreamContext, settings: NatsSettings, bucket: str) -> None:
    try:
        await js.key_value(bucket)
    except (BucketNotFoundError, NotFoundError):
        await js.create_key_value(
            KeyValueConfig(bucket=bucket, history=1, storage=_storage(settings), replicas=settings.replicas)
        )


async def _ensure_snapshots(js: JetStreamContext, settings: NatsSettings) -> None:
    try:
        await js.object_store(SNAPSHOT_BUCKET)
    except (BucketNotFoundError, NotFoundError):
        await js.create_object_store(SNAPSHOT_BUCKET, storage=_storage(settings), replicas=settings.replicas)


async def _ensure_stream_states(js: JetStreamContext, settings: NatsSettings) -> None:
    for bucket, ttl in ((STREAMS_BUCKET, settings.stream_state_ttl), (CURSORS_BUCKET, None)):
        try:
            await js.key_value(bucket)
        except (BucketNotFoundError, NotFoundError):
            await js.create_key_value(
                KeyValueConfig(
                    bucket=bucket, history=1, ttl=ttl, storage=_storage(settings), replicas=settings.replicas
                )
            )
