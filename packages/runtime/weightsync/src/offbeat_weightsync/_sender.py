"""The trainer's side of the transports between processes: admission, and one sync from the offer to the proofs."""

import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self, TypeVar

from torch import Tensor

from offbeat_core import DeadlineError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import ANSWER_BYTES, TcpAddress, admit, listen
from offbeat_weightsync._changes import WeightCopy, coded_buckets
from offbeat_weightsync._connection import (
    POLL_EVERY_S,
    UNDECLARED_S,
    Accepted,
    Changes,
    Connection,
    Deadline,
    End,
    Join,
    Loaded,
    Offer,
    Proof,
    Ready,
    Welcome,
    worker_name,
)
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._tensors import (
    Checksum,
    PlannedTensors,
    compare_proofs,
    kept_digest,
    plan_changes,
    planned_checksums,
)

T = TypeVar("T")

_GREETING_S: Final = 5.0
"""Time for an admitted receiver to send the rest of a message that it has begun: others wait meanwhile."""

_MAX_PENDING: Final = 64
"""Connections that have not asked for weights yet. For one more the oldest that has not shown the token has to go;
where all have, it waits in the kernel."""


@dataclass
class PendingConnection:
    """A new connection: the nonce it was sent, its answer, and whether it may ask for weights."""

    nonce: bytes = b""
    answer: bytes = b""
    is_admitted: bool = False


class WeightSender(ABC):
    """Sends weights to any number of receivers. Blocking; one thread at a time. Make one with `open_sender`.

    It listens from construction to `close`, so a receiver may connect before `send` is called.

    Args:
        address: where receivers find it.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.

    Attributes:
        transport: name of the transport that opens the receiver's side.
    """

    transport: ClassVar[str]

    def __init__(self, address: str | Path, plan: BucketPlan, *, deadline_s: float, name: str) -> None:
        self._listener, self.address = listen(address)
        self.plan, self._deadline_s, self._name = plan, deadline_s, name
        self._pending: dict[Connection, PendingConnection] = {}
        self._checksum: Checksum = "xxh3"

    @abstractmethod
    def _offer(self, peer: Connection, offer: Offer) -> None:
        """Say to a receiver what will come, and how."""

    @abstractmethod
    def _send_buckets(self, peers: list[Connection], plan: BucketPlan, source: PlannedTensors, version: int) -> None:
        """Send every bucket to all receivers."""

    def _meet(self, joined: Mapping[Connection, Join]) -> None:  # noqa: B027 - most share nothing
        """All receivers of a sync have joined: make ready what they share."""

    def _part(self) -> None:  # noqa: B027 - most share nothing
        """A sync has failed: let go of what its receivers shared."""

    @abstractmethod
    def _greet(self, sock: socket.socket, connection: Connection) -> PendingConnection | None:
        """Begin the greeting of a client that has connected; None: it is refused."""

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        for pending in list(self._pending):
            self._send_away(pending)

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
        plan: BucketPlan | None = None,
        copy: WeightCopy | None = None,
    ) -> list[WeightProof]:
        """Send one version to `num_receivers` receivers, and return what each has proved to hold.

        Args:
            tensors: (name, tensor) exactly as planned in name, order and shape; converted to the planned dtype.
            version: policy version; the receivers must ask for the same.
            num_receivers: how many to wait for before sending, at least 1. An engine whose workers receive counts once.
            deadline_s: overrides the sender's.
            is_withdrawn: asked while receivers are waited for: True ends the wait, as none will come or answer.
            plan: of the tensors, where these are some of the sender's, with its bucket size; None: the sender's.
            copy: of what was sent last: receivers that hold the same copy get the elements that have changed alone.

        Raises:
            WeightSyncError: tensors differ from the plan, a receiver failed or died, or holds other bytes; or it was
                withdrawn.
            DeadlineError: a receiver did not come, load or prove in time.
        """
        with self._joined(version, num_receivers, deadline_s, is_withdrawn) as joined:
            plan = plan or self.plan
            if copy is None:
                return self._send(list(joined), plan, tensors, version)
            changes = copy.can_change(plan) and all(join.copy == copy.digest for join in joined.values())
            copy.begin(plan, changes=changes)  # until `finish` it has no digest: after a failure all is sent
            given, base = (tensors, copy) if changes else (copy.kept(tensors), None)
            proofs = self._send(list(joined), plan, given, version, changes_to=base)
            copy.finish(proofs[0])  # any of them: each was compared with what was sent
            return proofs

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
            version: see `send`, also for the rest and for what it raises.
            num_receivers: how many to wait for before sending, at least 1.
            deadline_s: overrides the sender's.
        """
        with self._joined(version, num_receivers, deadline_s) as joined:
            ours = planned_checksums(self.plan, weights())
            plan = plan_changes(self.plan, ours, [join.held for join in joined.values()])
            sent = {spec.name for spec in plan.specs}
            kept = kept_digest(ours, sent) if len(sent) < len(ours) else ""
            changed = ((name, tensor) for name, tensor in weights() if name in sent)
            return self._send(list(joined), plan, changed, version, kept)

    def _send(
        self,
        peers: list[Connection],
        plan: BucketPlan,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        kept: str = "",
        changes_to: WeightCopy | None = None,
    ) -> list[WeightProof]:
        """Send to receivers that have joined; `kept` is the digest of what they hold already."""
        # Changes go over the connection whatever the transport, so they are hashed in host memory.
        checksum: Checksum = "xxh3" if changes_to is not None else self._checksum
        offer = Offer(
            plan.specs,
            plan.bucket_bytes,
            plan.digest,
            kept,
            changes=changes_to is not None,
            checksum=checksum,
            transport=self.transport,
        )
        for peer in peers:
            self._offer(peer, offer)
        ready = collect(peers, lambda peer: peer.receive(Ready, "its answer to the plan"), "to get ready")
        for peer, answer in zip(peers, ready, strict=True):
            if answer.digest != plan.digest:
                raise WeightSyncError(f"the plans differ: {plan.digest} here, {answer.digest} at {peer.peer}")
        source = PlannedTensors(plan, tensors, checksum)
        if changes_to is None:
            self._send_buckets(peers, plan, source, version)
        else:
            _send_changes(peers, plan, source, changes_to)
        sent = WeightProof(version=version, num_tensors=len(plan.specs), checksums=source.finish())
        for peer in peers:
            peer.send(End(sent))
        proofs = collect(peers, lambda peer: peer.receive(Proof, "its proof").held, "to prove what it holds")
        for peer, held in zip(peers, proofs, strict=True):
            compare_proofs(plan, sent, held, peer.peer)
        for peer in peers:
            # In a loop of its own: a receiver gets it only when every receiver has proved the same.
            peer.send(Accepted())
        return proofs

    @contextmanager
    def _joined(
        self,
        version: int,
        num_receivers: int,
        deadline_s: float | None,
        is_withdrawn: Callable[[], bool] = lambda: False,
    ) -> Iterator[dict[Connection, Join]]:
        """Yield the receivers of a sync. An error within is sent to all of them."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        deadline = Deadline(f"weight sync of version {version}", seconds, is_withdrawn)
        joined: dict[Connection, Join] = {}
        try:
            with deadline.declared("rollout"):
                self._gather(joined, version, num_receivers, deadline)
            self._meet(joined)
            yield joined
        except BaseException as error:
            for peer in joined:
                peer.fail(error)
            self._part()
            raise
        finally:
            for peer in joined:
                peer.close()

    def _gather(self, joined: dict[Connection, Join], version: int, num_receivers: int, deadline: Deadline) -> None:
        """Wait until all receivers have asked for this version."""
        refused: list[str] = []
        while missing := _missing(joined.values(), num_receivers):
            deadline.raise_if_withdrawn("receivers")
            arrived = self._accept(deadline, "; ".join([missing, *refused]))
            if arrived is None:
                continue
            peer, join = arrived
            if join.version < version:  # left over from a sync that failed
                refused.append(f"refused {join.name}, which asked for version {join.version}")
                peer.fail(
                    WeightSyncError(f"version {join.version} was asked for; {self._name} sends version {version}")
                )
                peer.close()
                continue
            # Also where its version is refused below: it is among those that the error is sent to.
            joined[peer] = join
            if join.version != version:
                raise WeightSyncError(f"{join.name} asked for version {join.version}; version {version} is being sent")
            peer.send(Welcome(self._name))

    def _accept(self, deadline: Deadline, missing: str) -> tuple[Connection, Join] | None:
        """Wait a moment for a client to connect, or to ask for weights. A silent client delays no other."""
        if not deadline.left_s():
            raise deadline.missed(missing)  # also while unknown clients keep coming
        with selectors.DefaultSelector() as selector:
            if len(self._pending) < _MAX_PENDING or self._oldest_unknown():
                selector.register(self._listener, selectors.EVENT_READ)
            for each in self._pending:
                selector.register(each, selectors.EVENT_READ, each)
            ready = selector.select(min(deadline.left_s(), POLL_EVERY_S))
        for key, _ in ready:
            if key.data is None:
                self._admit_next()
            if key.data not in self._pending:  # it was the oldest of too many, perhaps
                continue
            key.data.deadline = Deadline("greeting of a receiver", min(_GREETING_S, deadline.left_s()))
            join = self._read_greeting(key.data)
            if join is not None:  # the others that are ready still are the next time
                key.data.peer, key.data.deadline = join.name, deadline
                return key.data, join
        return None

    def _oldest_unknown(self) -> Connection | None:
        """Return the one that has to go for another; a receiver, which knows the token, never has to."""
        return next((each for each, pending in self._pending.items() if not pending.is_admitted), None)

    def _admit_next(self) -> None:
        """Take a connection, if it has not gone again."""
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        if len(self._pending) == _MAX_PENDING and (oldest := self._oldest_unknown()):
            self._send_away(oldest)
        connection = Connection(sock, "a receiver", Deadline("greeting of a receiver", _GREETING_S))
        try:
            pending = self._greet(sock, connection)
        except (WeightSyncError, DeadlineError):
            pending = None
        if pending is None:
            connection.close()
        else:
            self._pending[connection] = pending

    def _read_greeting(self, connection: Connection) -> Join | None:
        """Read what has arrived, and admit the client if it knows the token; return its request, once that is here."""
        pending = self._pending[connection]
        try:
            if pending.is_admitted:
                join = connection.receive(Join, "its request")
                connection.raise_if_spoken()  # it has given up since
                del self._pending[connection]
                return join
            room = bytearray(ANSWER_BYTES - len(pending.answer))
            pending.answer += room[: connection.receive_some(memoryview(room), "its greeting")]
            if len(pending.answer) < ANSWER_BYTES:
                return None
            address = TcpAddress.parse(self.address)
            assert address is not None
            pending.is_admitted = admit(connection, pending.nonce, pending.answer, address)
            if pending.is_admitted:
                return None
        except (WeightSyncError, DeadlineError):
            pass  # unauthenticated: it left, or stalled, before it had shown the token
        self._send_away(connection)
        return None

    def _send_away(self, pending: Connection) -> None:
        del self._pending[pending]
        pending.close()


def _missing(joined: Collection[Join], num_receivers: int) -> str:
    """Return what is still waited for; "" once so many engines are here, those whose workers receive with all of them.

    A worker that has not come is named if another one of its engine has.
    """
    workers: dict[str, list[Join]] = {}
    for join in joined:
        if join.engine:
            workers.setdefault(join.engine, []).append(join)
    names = [join.name for join in joined]
    expected = [worker_name(engine, rank) for engine, here in workers.items() for rank in here[0].workers]
    late = [worker for worker in expected if worker not in names]
    more = num_receivers - len(workers) - sum(not join.engine for join in joined)
    wanted = [f"{more} of {num_receivers} receivers"] * (more > 0) + late
    return f"{', '.join(wanted)} to connect (here: {', '.join(names) or 'none'})" if wanted else ""


def _send_changes(peers: list[Connection], plan: BucketPlan, source: PlannedTensors, copy: WeightCopy) -> None:
    """They are few, so the connection takes them, by whatever transport all weights would go."""
    for coded in coded_buckets(plan, source, copy):
        data = b"".join(run.data for run in coded)
        for peer in peers:
            # One that has given up is named before more is sent to it.
            peer.raise_if_spoken()
            peer.send(Changes([(run.coding, run.num_changed) for run in coded], len(data)))
            peer.send_data(memoryview(data))


def collect(peers: list[Connection], take: Callable[[Connection], T], what: str) -> list[T]:
    """Take what comes from every receiver, in whatever order they come."""
    taken: dict[Connection, T] = {}
    deadline = peers[0].deadline
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ, peer)
        while len(taken) < len(peers):
            missing = ", ".join(peer.peer for peer in peers if peer not in taken)
            ready = selector.select(min(deadline.left_s(), UNDECLARED_S))  # most come at once, and need no declaring
            if not ready:
                with deadline.declared(missing):
                    ready = selector.select(min(deadline.left_s(), POLL_EVERY_S))
            if not ready:
                deadline.raise_if_withdrawn(missing)
                if not deadline.left_s():
                    raise deadline.missed(f"{missing} {what}")
            for key, _ in ready:
                selector.unregister(key.fileobj)  # what it sends next belongs to a later step
                taken[key.data] = take(key.data)
    return [taken[peer] for peer in peers]


def await_loaded(peers: list[Connection], plan: BucketPlan, index: int) -> None:
    """Wait until every receiver has loaded a bucket."""
    bucket = f"bucket {index} of {len(plan.buckets)}"
    loaded = collect(peers, lambda peer: peer.receive(Loaded, bucket).bucket, f"to load {bucket}")
    for peer, number in zip(peers, loaded, strict=True):
        if number != index:
            raise WeightSyncError(f"{peer.peer} loaded bucket {number} where {index} was due")


def raise_if_spoken(peers: list[Connection]) -> None:
    """See `Connection.raise_if_spoken`."""
    for peer in peers:
        peer.raise_if_spoken()
