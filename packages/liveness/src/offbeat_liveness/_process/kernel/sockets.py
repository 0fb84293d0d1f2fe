"""TCP sockets as the kernel tells them, and the ports at which this process accepts connections."""

import contextlib
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

LISTENS: Final = "0A"
TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
MAX_TABLE_BYTES: Final = 4 << 20
MAX_PORTS: Final = 64


class TcpSocket(NamedTuple):
    """One line of the kernel's table; addresses in hex as they stand there, such as "0100007F:1F40"."""

    inode: str
    own: str
    peer: str
    state: str


def tcp_sockets() -> Iterator[TcpSocket]:
    """All of this network namespace; none where the platform does not tell.

    Source: proc_pid_net(5), tcp: local address, remote address and state are fields 1, 2 and 3, the inode field 9.
    """
    for table in TABLES:
        with contextlib.suppress(OSError), open(table, "rb") as file:
            for line in file.read(MAX_TABLE_BYTES).decode(errors="replace").splitlines()[1:]:
                fields = line.split(None, 10)
                if len(fields) > 9:
                    yield TcpSocket(inode=fields[9], own=fields[1], peer=fields[2], state=fields[3])


def listening_ports() -> tuple[int, ...]:
    """Those of this process in order, so that whoever waits for an answer from one is led here.

    None where the platform does not tell.
    """
    own = set(_own_sockets())
    ports = {_port(each.own) for each in tcp_sockets() if each.state == LISTENS and each.inode in own}
    return tuple(sorted(ports))[:MAX_PORTS]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _own_sockets() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").rstrip("]")
