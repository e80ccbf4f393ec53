"""What an embedded stack is to run, and where."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SERVICES = ("coordinator", "ingest", "matcher", "router")

Say = Callable[[str], None]
OnLine = Callable[[str, str], None]


@dataclass(frozen=True)
class StackOptions:
    """config_file: kvroute.yaml, else $KVROUTE_CONFIG, else built-in values.

    nats_url, redis_url: servers that run already; a URL in the configuration counts as well. Without one, a server is
    started. data_dir: where NATS and Redis keep their files; without one, in a folder that is removed at the end.
    any_ports: do not even try the usual ports. environment: for the services, over this process's own.
    start_timeout: seconds until everything has to be ready.
    """

    config_file: str | None = None
    data_dir: Path | None = None
    nats_url: str | None = None
    redis_url: str | None = None
    any_ports: bool = False
    services: tuple[str, ...] = SERVICES
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 60.0
