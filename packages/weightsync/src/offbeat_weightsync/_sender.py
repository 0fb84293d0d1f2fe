"""The trainer's side of the shared-memory transport."""

import os
import selectors
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from offbeat_types import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync._addresses import kernel_address, remove_socket
from offbeat_weightsync._connections import Connection, Deadline, M, same_user
from offbeat_weightsync._messages import Accepted, End, Filled, Hello, Join, Loaded, Proof, Ready
from offbeat_weightsync._plan import Bucket, BucketPlan, TensorSpec
from offbeat_weightsync._proofs import bucket_checksum, compare_proofs
from offbeat_weightsync._slots import NUM_SLOTS, Slots, create_memory, slot_size
from offbeat_weightsync._tensors import check_tensor, torch_dtype


class SharedMemorySender:
    """Sends weights to any number of receivers on this machine. Blocking; one thread at a time.

    It listens from construction to `close`, so a receiver may connect before `send` is called.

    Args:
        socket_path: where to listen; see `new_socket_path`.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.

    Raises:
        WeightSyncError: the address is taken or too long, or there is not enough memory.
    """

    def __init__(
        self, socket_path: str | Path, plan: BucketPlan, *, deadline_s: float = 300.0, name: str = "trainer-0"
    ) -> None:
        self.socket_path, self.plan = str(socket_path), plan
        self._deadline_s, self._name = deadline_s, name
        self._slot_bytes = slot_size(plan.longest_bucket_bytes)
        self._listener = _listen(socket_path)
        try:
            self._memory_fd = create_memory(self._slot_bytes)
        except BaseException:
            self.close()
            raise
        self._slots = Slots(self._memory_fd, self._slot_bytes, writable=True)

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
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        deadline = Deadline(f"weight sync of version {version}", deadline_s)
        peers: list[Connection] = []
        try:
            self._gather(peers, version, num_receivers, deadline)
            sent = WeightProof(
                version=version, num_tensors=len(self.plan.specs), checksums=tuple(self._send_buckets(peers, tensors))
            )
            return self._settle(peers, sent)
        except BaseException as error:
            for peer in peers:
                peer.fail(str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}")
            raise
        finally:
            for peer in peers:
                peer.close()

    def close(self) -> None:
        """Stop listening and let go of the memory."""
        if self._listener.fileno() < 0:
            return
        self._listener.close()
        remove_socket(self.socket_path)
        if hasattr(self, "_slots"):
            os.close(self._memory_fd)
            del self._slots

    def _gather(self, peers: list[Connection], version: int, num_receivers: int, deadline: Deadline) -> None:
        """Wait until all receivers have asked for this version and have mapped the memory."""
        refused: list[str] = []
        while len(peers) < num_receivers:
            names = ", ".join([peer.peer for peer in peers]) or "none"
            missing = f"{num_receivers - len(peers)} of {num_receivers} receivers to connect (here: {names})"
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
            peers.append(peer)
            if join.version != version:
                raise WeightSyncError(f"{join.name} asked for version {join.version}; version {version} is being sent")
            self._introduce(peer)
        for answer in self._collect(peers, Ready, "to map the memory").values():
            if answer.digest != self.plan.digest:
                raise WeightSyncError(f"the plans differ: {self.plan.digest} here, {answer.digest} at a receiver")

    def _accept(self, deadline: Deadline, missing: str) -> Connection | None:
        self._listener.settimeout(deadline.left_s() or 1e-3)
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            raise deadline.missed(missing) from None
        if not same_user(sock):
            sock.close()
            return None
        return Connection(sock, "a receiver", deadline)

    def _introduce(self, peer: Connection) -> None:
        specs = [(spec.name, spec.dtype, spec.shape) for spec in self.plan.specs]
        peer.send(Hello(self._name, specs, self.plan.bucket_bytes, self._slot_bytes, self.plan.digest))
        peer.send_descriptor(self._memory_fd)

    def _send_buckets(self, peers: list[Connection], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Fill and announce bucket after bucket, and yield the checksum of each."""
        source = _PlannedTensors(self.plan, tensors)
        num_buckets = len(self.plan.buckets)
        for index, bucket in enumerate(self.plan.buckets):
            if index >= NUM_SLOTS:
                self._collect_loaded(peers, index - NUM_SLOTS)
            source.fill(bucket, self._slots.of_bucket(index))
            for peer in peers:
                peer.send(Filled(index))
            # The receivers load the bucket while it is hashed: nobody writes to it before all have.
            yield bucket_checksum(bucket, self._slots.of_bucket(index).numpy())
        source.finish()
        for index in range(max(0, num_buckets - NUM_SLOTS), num_buckets):
            self._collect_loaded(peers, index)

    def _settle(self, peers: list[Connection], sent: WeightProof) -> list[WeightProof]:
        for peer in peers:
            peer.send(End(sent))
        proofs = self._collect(peers, Proof, "to prove what it holds")
        for peer in peers:
            compare_proofs(self.plan, sent, proofs[peer].held, peer.peer)
        for peer in peers:
            peer.send(Accepted())
        return [proofs[peer].held for peer in peers]

    def _collect_loaded(self, peers: list[Connection], bucket: int) -> None:
        what = f"to load bucket {bucket} of {len(self.plan.buckets)}"
        for peer, loaded in self._collect(peers, Loaded, what).items():
            if loaded.bucket != bucket:
                raise WeightSyncError(f"{peer.peer} loaded bucket {loaded.bucket} where {bucket} was due")

    def _collect(self, peers: list[Connection], kind: type[M], what: str) -> dict[Connection, M]:
        """Take one message from every receiver, in whatever order they come."""
        messages: dict[Connection, M] = {}
        with selectors.DefaultSelector() as selector:
            for peer in peers:
                selector.register(peer, selectors.EVENT_READ, peer)
            while len(messages) < len(peers):
                deadline = peers[0].deadline
                ready = selector.select(deadline.left_s())
                if not ready:
                    raise deadline.missed(f"{', '.join(peer.peer for peer in peers if peer not in messages)} {what}")
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    messages[key.data] = key.data.receive(kind, what.removeprefix("to "))
        return messages


class _PlannedTensors:
    """Takes tensors one by one from the trainer, checks them against the plan, and copies them into buckets."""

    def __init__(self, plan: BucketPlan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._specs = plan.specs
        self._tensors = iter(tensors)
        self._index = -1
        self._flat: Tensor | None = None

    def fill(self, bucket: Bucket, slot: Tensor) -> None:
        """Copy the pieces of a bucket into its slot, converting to the planned dtypes on the way."""
        for piece in bucket.pieces:
            if piece.tensor != self._index:
                self._take(piece.tensor)
            assert self._flat is not None
            target = slot[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            target = target.view(torch_dtype(self._specs[piece.tensor].dtype))
            first = piece.tensor_offset // target.element_size()
            target.copy_(self._flat[first : first + target.numel()])

    def finish(self) -> None:
        """Raise WeightSyncError if there are more tensors than planned."""
        self._flat = None
        for name, _ in self._tensors:
            raise WeightSyncError(f"{name}: {_describe_surplus(name, self._specs)}")

    def _take(self, index: int) -> None:
        spec = self._specs[index]
        self._flat = None  # let a tensor made for us go before the next one is made
        name, tensor = next(self._tensors, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(f"{spec.name}: planned, but the trainer's tensors ended before it")
        if name != spec.name:
            surplus = _describe_surplus(name, self._specs[:index])
            raise WeightSyncError(f"{name}: came where {spec.name} was planned; {surplus}")
        check_tensor(tensor, spec, "the trainer", dtype=False)
        self._index, self._flat = index, tensor.detach().reshape(-1)


def _describe_surplus(name: str, sent: Iterable[TensorSpec]) -> str:
    if any(spec.name == name for spec in sent):
        return "it was sent already: the name comes twice"
    return "names and order must be those of the plan"


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
