"""Where the services of a stack listen: the ports they were given, and the URLs under which they are reached."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvroute.embedded.options import Say
from kvroute.embedded.ports import choose_port, free_port
from services.runtime.config import Config

# One line per port: service, setting, what it is for.
PORTS = (
    ("router", "port", "HTTP API"),
    ("coordinator", "inference_port", "inference"),
    ("coordinator", "management_port", "management"),
    ("coordinator", "metrics_port", "metrics"),
    ("ingest", "port", "health and metrics"),
    ("matcher", "port", "health and metrics"),
)
READINESS = {"router": "port", "coordinator": "management_port", "ingest": "port", "matcher": "port"}


@dataclass(frozen=True)
class Addresses:
    """Host and port of everything that listens."""

    hosts: Mapping[str, str]
    ports: Mapping[tuple[str, str], int]

    def url(self, service: str, setting: str = "port") -> str:
        """HTTP base URL, as seen from this machine."""
        return f"http://{self.hosts[service]}:{self.ports[service, setting]}"

    def readiness_url(self, service: str) -> str:
        """Where a service says whether it is ready."""
        return self.url(service, READINESS[service]) + "/readyz"

    def environment(self) -> dict[str, str]:
        """The ports as settings for the services."""
        return {
            f"KVROUTE_{service.upper()}__{setting.upper()}": str(port)
            for (service, setting), port in self.ports.items()
        }


def choose_addresses(config: Config, services: tuple[str, ...], any_ports: bool, say: Say) -> Addresses:
    """The configured ports where they are free, others where not, which is said. Raises NoPortError."""
    hosts: dict[str, str] = {}
    ports: dict[tuple[str, str], int] = {}
    for service, setting, purpose in PORTS:
        if service not in services:
            continue
        section = getattr(config, service)
        taken = set(ports.values())
        wanted: int = getattr(section, setting)
        port = free_port(taken, section.host) if any_ports else choose_port(wanted, taken, section.host)
        if wanted and port != wanted and not any_ports:
            say(f"{service}: port {wanted} ({purpose}) is occupied, taking {port}")
        hosts[service] = _reachable(section.host)
        ports[service, setting] = port
    return Addresses(hosts, ports)


def _reachable(host: str) -> str:
    if host in ("::", "0.0.0.0", "", "*"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
