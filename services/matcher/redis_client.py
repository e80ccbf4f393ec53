"""A Redis client as configured: single server, Sentinel or Cluster."""

from typing import Any

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff

from services.runtime.settings import RedisSettings


def make_client(settings: RedisSettings) -> Any:
    """An unconnected client that returns bytes."""
    password = settings.password.get_secret_value() if settings.password else None
    common: dict[str, Any] = {"socket_timeout": settings.timeout, "socket_connect_timeout": settings.timeout}
    if password:
        common["password"] = password
    if settings.mode == "sentinel":
        return Sentinel([_address(text) for text in settings.sentinels], **common).master_for(settings.sentinel_service)
    url = settings.url.get_secret_value()
    if settings.mode == "cluster":
        return RedisCluster.from_url(url, **common)
    return redis.from_url(url, retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2), **common)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
