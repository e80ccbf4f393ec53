"""The settings that a stack gives its services, as environment variables over the configuration file."""

import os
from collections.abc import Mapping
from pathlib import Path

import services
from kvroute.embedded.addresses import Addresses
from kvroute.embedded.servers import stream_max_bytes
from services.runtime.config import FILE_VARIABLE, Config


def service_environment(
    base: Mapping[str, str],
    config: Config,
    config_file: str | None,
    addresses: Addresses,
    nats_url: str,
    redis_url: str,
    nats_folder: Path | None,
) -> dict[str, str]:
    """`base` with the ports and servers of this stack. nats_folder: where the NATS started here keeps its streams."""
    environment = {**base, **addresses.environment(), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = _with_own_packages(base.get("PYTHONPATH"))
    environment["KVROUTE_NATS__URL"] = nats_url
    if redis_url:
        environment["KVROUTE_REDIS__URL"] = redis_url
    if config_file:
        environment[FILE_VARIABLE] = os.path.abspath(config_file)
    if ("router", "port") in addresses.ports and "router_url" not in config.coordinator.front_door.model_fields_set:
        environment["KVROUTE_COORDINATOR__FRONT_DOOR__ROUTER_URL"] = addresses.url("router")
    if nats_folder is not None and "stream_max_bytes" not in config.nats.model_fields_set:
        environment["KVROUTE_NATS__STREAM_MAX_BYTES"] = str(stream_max_bytes(nats_folder, config.nats.stream_max_bytes))
    return environment


def _with_own_packages(path: str | None) -> str:
    """PYTHONPATH under which a child finds the same packages as this process, installed or not."""
    package = services.__file__
    assert package is not None
    own = str(Path(package).parent.parent)
    return own if not path else f"{own}{os.pathsep}{path}"
