"""Where a sender listens: a Unix socket, named without a file on Linux."""

import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Final

from offbeat_types import WeightSyncError

_NAMELESS: Final = sys.platform == "linux"

_MAX_PATH_BYTES: Final = 100
"""The kernel's own limit is 108 bytes on Linux and 104 on macOS, with the closing zero."""


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
