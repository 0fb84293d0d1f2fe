"""The trainer's side of the shared-memory transport."""

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from offbeat_types import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import kernel_address, remove_socket
from offbeat_weightsync._changes import kept_digest, plan_changes, planned_checksums
from offbeat_weightsync._connections import Connection, Deadline, same_user
from offbeat_weightsync._messages import Join, Welcome
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._rounds import Round
from offbeat_weightsync._slots import open_slots


class SharedMemorySender:
    """Sends weights to any number of receivers on this machine. Blocking; one thread at a time.

    It listens from construction to `close`, so a receiver may connect before `send` is called.

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
        self.socket_path, self.plan = str(socket_path), plan
        self._deadline_s, self._name = deadline_s, name
        self._listener = _listen(socket_path)
        try:
            self._slots = open_slots(device, plan)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SharedMemorySender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        num_receivers: int,
        *,
        deadline_s: float | None = None,
    ) -> list[WeightProof]:
        """Send one version to `num_receivers` receivers, and return what each has proved to hold.

        Args:
            tensors: (name, tensor) exactly as planned in name, order and shape; converted to the planned dtype.
            version: policy version; the receivers must ask for the same.
            num_receivers: how many to wait for before sending, at least 1.
            deadline_s: overrides the sender's.

        Raises:
            WeightSyncError: tensors differ from the plan, a receiver failed or died, or holds other bytes.
            DeadlineError: somebody did not come, load or prove in time.
        """
        with self._joined(version, num_receivers, deadline_s) as joined:
            return Round(list(joined), self.plan, self._slots).send(tensors, version)

    def send_changed(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        version: int,
        num_receivers: int,
        *,
        deadline_s: float | None = None,
    ) -> list[WeightProof]:
        """Send only those tensors that a receiver does not hold already, by the checksums it has joined with.

        A receiver that joins without checksums gets everything, and so do the others then. The proofs are of what was
        sent; what was not is covered by the checksums that the receiver took from its engine.

        Args:
            weights: gives (name, tensor) as planned, each time it is called; it is called twice.
            version: policy version; the receivers must ask for the same.
            num_receivers: how many to wait for before sending, at least 1.
            deadline_s: overrides the sender's.

        Raises:
            WeightSyncError: see `send`.
            DeadlineError: see `send`.
        """
        with self._joined(version, num_receivers, deadline_s) as joined:
            ours = planned_checksums(self.plan, weights())
            plan = plan_changes(self.plan, ours, [join.held for join in joined.values()])
            sent = {spec.name for spec in plan.specs}
            kept = kept_digest(ours, sent) if len(sent) < len(ours) else ""
            changed = ((name, tensor) for name, tensor in weights() if name in sent)
            return Round(list(joined), plan, self._slots, kept).send(changed, version)

    def close(self) -> None:
        """Stop listening and let go of the memory."""
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        remove_socket(self.socket_path)
        if hasattr(self, "_slots"):
            self._slots.close()
            del self._slots

    @contextmanager
    def _joined(self, version: int, num_receivers: int, deadline_s: float | None) -> Iterator[dict[Connection, Join]]:
        """The receivers of a sync. An error within is told to all of them."""
        deadline = Deadline(f"weight sync of version {version}", self._deadline_s if deadline_s is None else deadline_s)
        joined: dict[Connection, Join] = {}
        try:
            self._gather(joined, version, num_receivers, deadline)
            yield joined
        except BaseException as error:
            for peer in joined:
                peer.fail(str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}")
            raise
        finally:
            for peer in joined:
                peer.close()

    def _gather(self, joined: dict[Connection, Join], version: int, num_receivers: int, deadline: Deadline) -> None:
        """Wait until all receivers have asked for this version."""
        refused: list[str] = []
        while len(joined) < num_receivers:
            names = ", ".join([peer.peer for peer in joined]) or "none"
            missing = f"{num_receivers - len(joined)} of {num_receivers} receivers to connect (here: {names})"
            peer = self._accept(deadline, "; ".join([missing, *refused]))
            if peer is None:
                continue
            try:
                join = peer.receive(Join, "its request")
            except WeightSyncError:
                peer.close()  # nobody: it connected and left before it said who it was
                continue
            peer.peer = join.name
            if join.version < version:  # left over from a sync that failed
                refused.append(f"refused {join.name}, which asked for version {join.version}")
                peer.fail(f"version {join.version} was asked for; {self._name} sends version {version}")
                peer.close()
                continue
            joined[peer] = join
            if join.version != version:
                raise WeightSyncError(f"{join.name} asked for version {join.version}; version {version} is being sent")
            peer.send(Welcome(self._name))

    def _accept(self, deadline: Deadline, missing: str) -> Connection | None:
        self._listener.settimeout(deadline.left_s() or 1e-3)
        try:
            with deadline.declared("rollout"):
                sock, _ = self._listener.accept()
        except TimeoutError:
            raise deadline.missed(missing) from None
        if not same_user(sock):
            sock.close()
            return None
        return Connection(sock, "a receiver", deadline)


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
