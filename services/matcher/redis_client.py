"""A Redis client as configured: single server, Sentinel or Cluster."""

from typing import Any

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from services.runtime.settings import RedisSettings


class _Cluster(RedisCluster):  # type: ignore[type-arg]
    """A cluster client that also survives the loss of every node it knows.

    The library looks for the cluster at the nodes it discovered last. When all of them are gone (Pods that came back
    with other addresses) it would look there for ever; so it is sent back to the configured address. It also reports
    that as an exception of no common base, which here is a connection error like any other.
    """

    configured: dict[str, Any]

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """As the library's, with connection errors only."""
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            self.nodes_manager.startup_nodes = dict(self.configured)
            raise RedisConnectionError(str(error)) from error


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
        cluster = _Cluster.from_url(url, **common)
        cluster.configured = dict(cluster.nodes_manager.startup_nodes)
        return cluster
    return redis.from_url(url, retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2), **common)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
