"""Addresses of publishers and engines: one spelling per address, and never a listening wildcard as a target."""

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HOST = 253
MAX_PORT = 65_535

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_NUMERIC = re.compile(r"[0-9.]+")
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TCP = re.compile(r"tcp://(?P<host>\[[^\[\]]*\]|[^\[\]:/]*):(?P<port>[0-9]{1,9})/?", re.IGNORECASE)


class AddressError(ValueError):
    """An address that cannot be used; the text says what is wrong, ``fix`` what to write instead."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.fix = fix


class TcpEndpoint(NamedTuple):
    """Host (canonical, without brackets) and port. ``WILDCARD`` as host means "every address of the publisher"."""

    host: str
    port: int

    @property
    def wildcard(self) -> bool:
        """Whether this is a place to listen on, not one to connect to."""
        return self.host == WILDCARD

    def url(self) -> str:
        """The ZMQ form, IPv6 in brackets."""
        return f"tcp://{bracketed(self.host)}:{self.port}"


WILDCARD = "*"


def canonical_host(host: str) -> str:
    """The one spelling of a host: IPv6 compressed and without brackets (its scope id kept), IPv4 in IPv6 as IPv4,
    names in lower case without a final dot, each way to write "any address" as ``*``.

    Raises AddressError.
    """
    text = host.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
        if ":" not in text:
            raise AddressError(f"{host!r} has brackets around something that is no IPv6 address", "leave them out")
    if text in ("", WILDCARD):
        return WILDCARD
    if ":" in text:
        return _canonical_ipv6(text)
    if _NUMERIC.fullmatch(text):
        try:
            address = ipaddress.IPv4Address(text)
        except ValueError as error:
            raise AddressError(f"{host!r} is no IPv4 address", "write four numbers from 0 to 255") from error
        return WILDCARD if address.is_unspecified else str(address)
    if len(text) > MAX_HOST or not _HOST_NAME.fullmatch(text):
        raise AddressError(f"{text[:80]!r} is no host name", "write a DNS name or an IP address")
    return text.rstrip(".").lower()


def _canonical_ipv6(text: str) -> str:
    plain, percent, scope = text.partition("%")
    try:
        address = ipaddress.IPv6Address(plain)
    except ValueError as error:
        raise AddressError(f"{text[:80]!r} is no IPv6 address", "write it like fd00::1") from error
    if percent and not _SCOPE.fullmatch(scope):
        raise AddressError(f"{text[:80]!r} has no valid scope id", "write it like fe80::1%eth0")
    if address.is_unspecified:
        return WILDCARD
    if address.ipv4_mapped is not None:
        return WILDCARD if address.ipv4_mapped.is_unspecified else str(address.ipv4_mapped)
    return f"{address}{percent}{scope}"


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def parse_tcp(url: str) -> TcpEndpoint:
    """Read ``tcp://host:port``; port 0 and ports above 65535 are refused. Raises AddressError."""
    match = _TCP.fullmatch(url.strip())
    if match is None:
        raise AddressError(
            f"{url[:120]!r} is not of the form tcp://host:port",
            "write tcp://10.0.0.5:5557, or tcp://[fd00::5]:5557 for IPv6",
        )
    host, port = canonical_host(match["host"]), int(match["port"])
    if not 1 <= port <= MAX_PORT:
        raise AddressError(f"port {port} of {url[:120]!r} cannot be connected to", f"give a port from 1 to {MAX_PORT}")
    return TcpEndpoint(host, port)


def parse_http(url: str, host: str | None = None) -> str:
    """An HTTP base URL in one spelling, without a final slash; a wildcard host is replaced by ``host``.

    Raises AddressError, also for credentials, queries and wildcards that cannot be replaced.
    """
    fix = "write http://host:port"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise AddressError(f"{url[:120]!r} is no URL: {error}", fix) from error
    if parts.scheme.lower() not in ("http", "https") or not parts.netloc:
        raise AddressError(f"{url[:120]!r} is no http or https URL", fix)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise AddressError("must not carry credentials, a query or a fragment", fix)
    if port == 0:
        raise AddressError(f"port 0 of {url[:120]!r} cannot be connected to", f"give a port from 1 to {MAX_PORT}")
    target = canonical_host(parts.netloc.removesuffix(f":{port}") if port is not None else parts.netloc.rstrip(":"))
    if target == WILDCARD:
        if host is None:
            raise AddressError(f"{url[:120]!r} is an address to listen on", "give the address to connect to")
        target = host
    place = bracketed(target) if port is None else f"{bracketed(target)}:{port}"
    return f"{parts.scheme.lower()}://{place}{parts.path.rstrip('/')}"
