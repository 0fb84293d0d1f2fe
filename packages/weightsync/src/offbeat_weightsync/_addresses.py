"""Where a sender listens: a Unix socket, named without a file on Linux; or host, port and a secret token."""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from offbeat_types import WeightSyncError

_NAMELESS: Final = sys.platform == "linux"

_MAX_PATH_BYTES: Final = 100
"""The kernel's own limit is 108 bytes on Linux and 104 on macOS, with the closing zero."""


_TCP: Final = "tcp"

_EVERYWHERE: Final = ("0.0.0.0", "::", "*")


class TcpAddress(NamedTuple):
    """Where a sender listens for receivers of any host. As text it is without the token: that is for errors and logs.

    Args:
        host: IP address or name under which receivers reach it, and of the interface it listens on.
        port: 0: any that is free.
        token: whoever knows it may connect.
    """

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, address: str) -> "TcpAddress | None":
        """Read what `with_token` wrote; None: it is an address of another kind.

        Raises:
            WeightSyncError: it lacks host, port or token.
        """
        if not address.startswith(f"{_TCP}://"):
            return None
        try:
            parts = urlsplit(address)
            host, port, token = parts.hostname, parts.port, parts.username
        except ValueError:
            host = port = token = None
        if not host or port is None or not token:
            raise WeightSyncError("an address over TCP reads tcp://TOKEN@HOST:PORT; use new_address(host)")
        return cls(host, port, token)

    def with_token(self) -> str:
        """Text to hand to receivers, and to nobody else."""
        return f"{_TCP}://{self.token}@{self._place}"

    def __str__(self) -> str:
        return f"{_TCP}://{self._place}"

    @property
    def _place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def new_address(host: str = "", port: int = 0) -> str:
    """Make an address for `open_sender`; the sender's own `address` is then what receivers are given.

    Args:
        host: "" for receivers of this machine, by shared memory. Otherwise the IP address or name under which receivers
            of other machines reach this one: the address gets a secret token, and whoever has it may connect. The bytes
            are not encrypted: use networks that you trust.
        port: to listen on over TCP; 0 takes a free one.

    Raises:
        WeightSyncError: the host stands for every interface.
    """
    if not host:
        return new_socket_path()
    if host in _EVERYWHERE:
        raise WeightSyncError(f"receivers must know where to connect: give this machine's own address, not {host}")
    return TcpAddress(host, port, secrets.token_hex(16)).with_token()


def new_socket_path() -> str:
    """Make an address for a sender to listen on, unique on this machine.

    On Linux it is a name in the kernel ("@offbeat-..."), which vanishes with its process, so that even `kill -9`
    leaves nothing behind; who connects is checked to be the same user. Elsewhere it is a file in a fresh folder.
    """
    if _NAMELESS:
        return f"@offbeat-{os.getpid()}-{secrets.token_hex(8)}"
    return str(Path(tempfile.mkdtemp(prefix="offbeat-", dir="/tmp")) / "weights")  # $TMPDIR may be too long


def kernel_address(socket_path: str | Path) -> str:
    """What to pass to bind or connect.

    Raises:
        WeightSyncError: the path is too long for a Unix socket.
    """
    path = str(socket_path)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise WeightSyncError(f"a socket path has at most {_MAX_PATH_BYTES} bytes; use new_socket_path(): got {path}")
    return "\0" + path[1:] if path.startswith("@") else path


def remove_socket(socket_path: str | Path) -> None:
    """Remove what a closed sender leaves in the file system, if anything."""
    if not str(socket_path).startswith("@"):
        Path(socket_path).unlink(missing_ok=True)
        parent = Path(socket_path).parent
        if parent.name.startswith("offbeat-") and not any(parent.iterdir()):
            parent.rmdir()
