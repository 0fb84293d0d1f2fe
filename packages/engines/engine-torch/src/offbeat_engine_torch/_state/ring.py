"""Connections of each rank to the next one, for bytes that travel while the ranks compute.

Expected: a collective of gloo ends when a rank dies in it. Happens (gloo in torch 2.13, tcp/pair.cc, signalException):
who has received a part of a message waits on for the rest, as only messages that have not begun are told of the error;
and its group cannot be destroyed, which waits for it. A copy is the longest message that there is. Of a connection of
its own a process learns at once that the other end has died, and it can close its own end. Can go when gloo tells
operations under way.
"""

import contextlib
import secrets
import socket
import threading
from typing import Final

import torch
from torch import Tensor

from offbeat_core import DeadlineError, PeerFailedError
from offbeat_mesh import Group, current_world

_TOKEN_BYTES: Final = 16
_CHUNK_BYTES: Final = 4 * 2**20
_SILENT_S: Final = 15
"""A host that is lost says nothing: after so long without a sign of its system the connection counts as closed."""


class Ring:
    """A connection to the next rank, and one from the rank before. Make one with `open`.

    Args:
        before: number of the rank that sends to this one, for errors.
        incoming, outgoing: connected, with timeouts, which are for the next bytes.
    """

    def __init__(self, before: int, incoming: socket.socket, outgoing: socket.socket) -> None:
        self._before, self._incoming, self._outgoing = before, incoming, outgoing

    @classmethod
    def open(cls, ranks: Group) -> "Ring":
        """Connect each rank to the next one; a call of all ranks.

        Raises:
            PeerFailedError: one of the two does not come.
        """
        world = current_world()
        assert world is not None
        token = secrets.token_bytes(_TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in world.host else socket.AF_INET
        with socket.create_server((world.host, 0), family=family) as listener:
            listener.settimeout(world.deadline_s)
            places = ranks.all_gather_data([world.host, listener.getsockname()[1], token])
            host, port, wanted = places[(ranks.rank + 1) % ranks.size]
            try:
                outgoing = socket.create_connection((host, port), world.deadline_s)
                outgoing.sendall(wanted)
                incoming = _accept(listener, token)
            except OSError as error:
                raise PeerFailedError("a neighbour in the ring of ranks", f"no connection: {error}") from error
        for end in (incoming, outgoing):
            _notice_silence(end)
            end.settimeout(world.deadline_s)
        return cls((ranks.rank - 1) % ranks.size, incoming, outgoing)

    def pass_on(self, own: Tensor, num_bytes: int) -> Tensor:
        """Give bytes to the next rank, and return those of the rank before; all ranks do.

        Args:
            own: [n] uint8.
            num_bytes: that the rank before gives.

        Raises:
            PeerFailedError: a connection has ended.
            DeadlineError: no byte has come for so long.
        """
        arrived = torch.empty(num_bytes, dtype=torch.uint8)
        sending = threading.Thread(target=self._send, args=(own.numpy().data,), daemon=True)
        sending.start()
        left = arrived.numpy().data
        try:
            while left:
                count = self._incoming.recv_into(left[:_CHUNK_BYTES])
                if not count:
                    raise ConnectionError("it has closed its connection")
                left = left[count:]
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # with a number, the other host is gone
                limit_s = self._incoming.gettimeout() or 0.0
                raise DeadlineError("copies of ranks' states", f"rank {self._before}", limit_s) from error
            raise PeerFailedError(f"rank {self._before}", f"its copy has not arrived: {error}") from error
        sending.join()
        return arrived

    def _send(self, own: memoryview) -> None:
        with contextlib.suppress(OSError):  # the next rank has died, or is stopped: the next call of the group says so
            while own:  # `sendall` would have one deadline for all bytes
                own = own[self._outgoing.send(own[:_CHUNK_BYTES]) :]

    def close(self) -> None:
        """Close both ends, from any thread: what waits for them ends."""
        for end in (self._incoming, self._outgoing):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Return the connection of the rank that knows the token."""
    while True:
        end, _ = listener.accept()
        end.settimeout(listener.gettimeout())
        found = b""
        with contextlib.suppress(OSError):
            while len(found) < len(token) and (part := end.recv(len(token) - len(found))):
                found += part
        if secrets.compare_digest(found, token):
            return end
        end.close()


def _notice_silence(end: socket.socket) -> None:
    """Have a connection fail soon when the other host is gone."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _SILENT_S // 3), ("TCP_KEEPINTVL", _SILENT_S // 3), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # not on all systems
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
