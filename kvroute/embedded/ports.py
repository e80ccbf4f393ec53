"""Which port to listen on: the usual one where it is free, else a free one."""

import contextlib
import errno
import random
import socket
from collections.abc import Collection

# Below the range from which systems take ports for outgoing connections, so that none of those gets in between.
FREE_PORTS = range(20_000, 32_000)
ATTEMPTS = 1000


class NoPortError(RuntimeError):
    """No port could be had."""


def is_free(port: int, host: str = "::") -> bool:
    """Whether a server could listen on the port of this host now; ``::`` stands for every IPv4 and IPv6 address."""
    hosts = ("::", "0.0.0.0") if host == "::" else (host,)
    return all(_can_bind(address, port) for address in hosts)


def free_port(taken: Collection[int] = (), host: str = "::") -> int:
    """A port that is free now and not among the taken ones. Raises NoPortError."""
    for _ in range(ATTEMPTS):
        port = random.choice(FREE_PORTS)
        if port not in taken and is_free(port, host):
            return port
    raise NoPortError(f"no free port among {FREE_PORTS.start} to {FREE_PORTS.stop - 1}")


def choose_port(wanted: int, taken: Collection[int] = (), host: str = "::") -> int:
    """The wanted port if it is free and not taken, else another; 0 asks for any."""
    if wanted and wanted not in taken and is_free(wanted, host):
        return wanted
    return free_port(taken, host)


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # a machine without IPv6 has no IPv6 port that could be occupied
    with contextlib.closing(probe):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
            # Linux lets two sockets bind one port until one of them listens.
            probe.listen(1)
        except OSError as error:
            return error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and host == "::"
        return True
