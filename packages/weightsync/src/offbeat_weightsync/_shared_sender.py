"""The trainer's side of the shared-memory transport."""

import socket
from pathlib import Path
from typing import Final

from offbeat_types import DeadlineError, WeightSyncError
from offbeat_weightsync._addresses import kernel_address, remove_socket
from offbeat_weightsync._connections import LOOK_UP_S, Connection, Deadline, same_user
from offbeat_weightsync._messages import Join
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._rounds import Round
from offbeat_weightsync._sender import WeightSender
from offbeat_weightsync._shared_rounds import SharedMemoryRound
from offbeat_weightsync._slots import open_slots

_GREETING_S: Final = 5.0
"""For who has connected to say who it is: others wait meanwhile."""


class SharedMemorySender(WeightSender):
    """Sends weights to any number of receivers on this machine: see `WeightSender`.

    Args:
        socket_path: where to listen; see `new_socket_path`.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.
        device: a CUDA device to hold what is on its way, such as "cuda:0", which the receivers open by CUDA
            IPC; None: it lies in host memory.

    Raises:
        WeightSyncError: there is no such device, the address is taken or too long, or there is not enough memory.
    """

    def __init__(
        self,
        socket_path: str | Path,
        plan: BucketPlan,
        *,
        deadline_s: float = 300.0,
        name: str = "trainer-0",
        device: str | None = None,
    ) -> None:
        super().__init__(str(socket_path), plan, deadline_s=deadline_s, name=name)
        self.socket_path = self.address
        self._listener = _listen(socket_path)
        try:
            self._slots = open_slots(device, plan)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and let go of the memory."""
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        remove_socket(self.socket_path)
        if hasattr(self, "_slots"):
            self._slots.close()
            del self._slots

    def _round(self, joined: dict[Connection, Join], plan: BucketPlan, kept: str) -> Round:
        return SharedMemoryRound(list(joined), plan, self._slots, kept)

    def _accept(self, deadline: Deadline, missing: str) -> tuple[Connection, Join] | None:
        self._listener.settimeout(min(deadline.left_s(), LOOK_UP_S) or 1e-3)
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            if deadline.left_s():
                return None
            raise deadline.missed(missing) from None
        greeting = Deadline(deadline.waiting, min(_GREETING_S, deadline.left_s()))
        peer = Connection(sock, "a receiver", greeting)
        try:
            if same_user(sock):
                join = peer.receive(Join, "its request")
                peer.deadline = deadline
                return peer, join
        except (WeightSyncError, DeadlineError):
            pass  # nobody: it connected, and left or stopped before it said who it was
        peer.close()
        return None

    def _part(self, peer: Connection) -> None:
        peer.close()


def _listen(socket_path: str | Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(kernel_address(socket_path))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise WeightSyncError(f"cannot listen for receivers at {socket_path}: {error.strerror or error}") from error
    except WeightSyncError:
        listener.close()
        raise
    return listener
