"""What the ranks of a group say to each other about one sync, whichever way the bytes go."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from offbeat_mesh import Device, Group, current_world
from offbeat_types import MismatchError, OffbeatError, TensorSpec, WeightProof, WeightSyncError
from offbeat_weightsync._connections import Deadline
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._proofs import compare_proofs, proof_from_data

T = TypeVar("T")


class Terms(NamedTuple):
    """What will come, and how.

    Args:
        plan: of the tensors.
        window_bytes: no window is longer, if the bytes go by the group's broadcast.
        address: of the sender, if they go over streams; "" otherwise.
    """

    plan: BucketPlan
    window_bytes: int = 0
    address: str = ""


class GroupTalk:
    """One rank's part. All members make these calls alike.

    Args:
        group: of the sync.
        source: group-relative rank of the sender.
        version: that this rank sends or wants.
        deadline: of the sync.
    """

    def __init__(self, group: Group, source: int, version: int, deadline: Deadline) -> None:
        self.group, self.source, self.version, self.deadline = group, source, version, deadline

    def offer(self, terms: Terms) -> None:
        """The sender says what will come; raises on all ranks if they want different things."""
        plan = terms.plan
        specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in plan.specs]
        how = {"window_bytes": terms.window_bytes, "address": terms.address}
        header = {"specs": specs, "bucket_bytes": plan.bucket_bytes, **how}
        self.group.broadcast_data(header, self.source, deadline_s=self.left_s())
        self._agree_on(plan.digest)

    def decline(self, failure: BaseException) -> None:
        """The sender says, where an offer is due, that nothing will come: `learn` raises on all other ranks."""
        self.group.broadcast_data({"failure": one_line(failure)}, self.source, deadline_s=self.left_s())

    def learn(self) -> Terms:
        """The receivers hear what will come; raises on all ranks if they want different things."""
        header: Any = self.group.broadcast_data(None, self.source, deadline_s=self.left_s())
        if "failure" in header:
            raise WeightSyncError(f"rank {self.group.ranks[self.source]} gave up: {header['failure']}")
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in header["specs"]]
        try:
            plan = BucketPlan.build(specs, header["bucket_bytes"])
        except WeightSyncError as error:
            self._agree_on(str(error))  # differs, so it raises on all ranks
            raise
        self._agree_on(plan.digest)
        return Terms(plan, header["window_bytes"], header["address"])

    def agree_to_go_on(self, failure: BaseException | None) -> None:
        """Go on if all ranks are well; otherwise raise on all of them."""
        text = None if failure is None else one_line(failure)
        for rank, said in zip(self.group.ranks, self.gather(text), strict=True):
            if said is not None:
                raise failure or WeightSyncError(f"rank {rank} gave up: {said}")

    def settle(self, plan: BucketPlan, sent: WeightProof, report: Any) -> list[WeightProof]:
        """Exchange what the receivers hold or what became of them; every rank comes to the same verdict."""
        proofs = []
        for member, said in enumerate(self.gather(report)):
            holder = f"rank {self.group.ranks[member]}"
            if isinstance(said, str):
                raise WeightSyncError(f"{holder} gave up: {said}")
            if member != self.source:
                proofs.append(proof_from_data(said))
                compare_proofs(plan, sent, proofs[-1], holder)
        return proofs

    def gather(self, value: Any, *, grace_s: float = 0.0) -> list[Any]:
        """Every member's value. `grace_s`: more time than the sync has left, to say how it has ended."""
        return list(self.group.all_gather_data(value, deadline_s=self.left_s() + grace_s))

    def left_s(self) -> float:
        """Seconds left for a call of the group."""
        return max(0.001, self.deadline.left_s())

    def _agree_on(self, digest: str) -> None:
        try:
            value = {"version": self.version, "plan": digest}
            self.group.check_equal(value, what="policy version and bucket plan", deadline_s=self.left_s())
        except MismatchError as error:
            raise WeightSyncError(str(error)) from error


def apart(call: Callable[[], T]) -> T:
    """Make calls of a group in a thread that ends with them: the group belongs to it for as long as it lives."""
    with ThreadPoolExecutor(1, "offbeat-weight-talk") as thread:
        return thread.submit(call).result()


def device_of(device: Device | None) -> Device:
    """The device asked for, or the world's."""
    if device is not None:
        return device
    world = current_world()
    if world is None:
        raise WeightSyncError("a broadcast of weights needs a world: call join_world() on all ranks first")
    return world.device


def one_line(error: BaseException) -> str:
    """What to tell the other ranks."""
    return str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
