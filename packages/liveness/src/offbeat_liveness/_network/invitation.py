"""How a process that is started from a watched one meets it, and all that it knows: by two environment variables.

For processes that share neither a world nor a dump folder, such as a driver and its rollout engines on other hosts.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from offbeat_liveness._network.side_channel import LOOPBACK

MEETING: Final = "OFFBEAT_LIVENESS_MEETING"
SECRET: Final = "OFFBEAT_LIVENESS_SECRET"
PROBE_PORT: Final = 9


@dataclass(frozen=True)
class Invitation:
    """Where the monitor of the process that started this one listens, and what messages within the run must hold."""

    host: str
    port: int
    secret: str

    def variables(self) -> dict[str, str]:
        """As environment variables."""
        return {MEETING: f"{self.host}:{self.port}", SECRET: self.secret}


def read_invitation(environment: Mapping[str, str] = os.environ) -> Invitation | None:
    """The invitation that this process was started with, None without a place or without a secret."""
    host, _, port = environment.get(MEETING, "").rpartition(":")
    secret = environment.get(SECRET, "")
    return Invitation(host, int(port), secret) if host and port.isdecimal() and secret else None


def is_loopback(host: str) -> bool:
    """Whether only processes of this host get there."""
    return host in ("localhost", "::1") or host.startswith("127.")


def address_toward(*hosts: str) -> str:
    """The address by which this host reaches the first that is another one; loopback if none is."""
    for host in hosts:
        if host and not is_loopback(host):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect((host, PROBE_PORT))  # sends nothing: it only chooses a route
                return str(probe.getsockname()[0])
    return LOOPBACK
