"""The trainer's side of the transports between processes: who listens, who has joined, and how a sync ends."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from torch import Tensor

from offbeat_types import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync._changes import kept_digest, plan_changes, planned_checksums
from offbeat_weightsync._connections import Connection, Deadline
from offbeat_weightsync._messages import Join, Welcome
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._rounds import Round


class WeightSender(ABC):
    """Sends weights to any number of receivers. Blocking; one thread at a time. Make one with `open_sender`.

    It listens from construction to `close`, so a receiver may connect before `send` is called.

    Args:
        address: where receivers find it.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.
    """

    def __init__(self, address: str, plan: BucketPlan, *, deadline_s: float, name: str) -> None:
        self.address, self.plan = address, plan
        self._deadline_s, self._name = deadline_s, name

    @abstractmethod
    def close(self) -> None:
        """Stop listening and let go of the memory."""

    @abstractmethod
    def _accept(self, deadline: Deadline, missing: str) -> tuple[Connection, Join] | None:
        """Wait `LOOK_UP_S` at most for the next receiver; None: it was none, or not yet all of it."""

    @abstractmethod
    def _round(self, joined: dict[Connection, Join], plan: BucketPlan, kept: str) -> Round:
        """A sync with receivers that have joined."""

    @abstractmethod
    def _part(self, peer: Connection) -> None:
        """Hang up."""

    def __enter__(self) -> Self:
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
        is_withdrawn: Callable[[], bool] = lambda: False,
    ) -> list[WeightProof]:
        """Send one version to `num_receivers` receivers, and return what each has proved to hold.

        Args:
            tensors: (name, tensor) exactly as planned in name, order and shape; converted to the planned dtype.
            version: policy version; the receivers must ask for the same.
            num_receivers: how many to wait for before sending, at least 1.
            deadline_s: overrides the sender's.
            is_withdrawn: asked while receivers are waited for: True ends the wait, as none will come or answer.

        Raises:
            WeightSyncError: tensors differ from the plan, a receiver failed or died, or holds other bytes; or it was
                withdrawn.
            DeadlineError: somebody did not come, load or prove in time.
        """
        with self._joined(version, num_receivers, deadline_s, is_withdrawn) as joined:
            return self._round(joined, self.plan, "").send(tensors, version)

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
            return self._round(joined, plan, kept).send(changed, version)

    @contextmanager
    def _joined(
        self,
        version: int,
        num_receivers: int,
        deadline_s: float | None,
        is_withdrawn: Callable[[], bool] = lambda: False,
    ) -> Iterator[dict[Connection, Join]]:
        """The receivers of a sync. An error within is told to all of them."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        deadline = Deadline(f"weight sync of version {version}", seconds, is_withdrawn)
        joined: dict[Connection, Join] = {}
        try:
            with deadline.declared("rollout"):
                self._gather(joined, version, num_receivers, deadline)
            yield joined
        except BaseException as error:
            for peer in joined:
                peer.fail(str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}")
            raise
        finally:
            for peer in joined:
                self._part(peer)

    def _gather(self, joined: dict[Connection, Join], version: int, num_receivers: int, deadline: Deadline) -> None:
        """Wait until all receivers have asked for this version."""
        refused: list[str] = []
        while len(joined) < num_receivers:
            deadline.look_up("receivers")
            names = ", ".join([peer.peer for peer in joined]) or "none"
            missing = f"{num_receivers - len(joined)} of {num_receivers} receivers to connect (here: {names})"
            arrived = self._accept(deadline, "; ".join([missing, *refused]))
            if arrived is None:
                continue
            peer, join = arrived
            peer.peer = join.name
            if join.version < version:  # left over from a sync that failed
                refused.append(f"refused {join.name}, which asked for version {join.version}")
                peer.fail(f"version {join.version} was asked for; {self._name} sends version {version}")
                self._part(peer)
                continue
            joined[peer] = join
            if join.version != version:
                raise WeightSyncError(f"{join.name} asked for version {join.version}; version {version} is being sent")
            peer.send(Welcome(self._name))
