"""Sockets that listen, their addresses, and the descriptors that a process may have."""

import ipaddress
import resource
import socket
from typing import Final

MAX_DESCRIPTORS: Final = 65_536
"""More than all our bounds together. Hard limits reach 10^9, and programs that we start may close every number up to
the limit one by one."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet.

    Args:
        host: name or address, IPv6 with or without brackets.
        port: 0 for a free one.

    Raises:
        OSError: the address cannot be bound.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Say whether only processes of this machine reach a name or an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one, for this process and those that it starts from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
