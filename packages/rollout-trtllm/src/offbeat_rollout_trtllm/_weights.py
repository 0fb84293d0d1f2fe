"""Weights of one replica: all its ranks hand over handles, its leader talks to the engine, and all of them agree.

A rank of the trainer and a worker of the engine share each GPU. The weights go over in flushes; in each, the handles of
all ranks of the replica meet at its leader, who gives them to the engine. What only the leader can know (whether the
engine loads a model in parts, whether it took a flush) is decided for the whole replica: by its first rank, in the
replica's own group, never by global rank 0. So every rank makes the same calls, and an error of one is raised on all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from offbeat_mesh import Mesh
from offbeat_rollout_trtllm._flushes import plan_flushes
from offbeat_rollout_trtllm._handles import HandleFormat, Packed, tensors_checksum
from offbeat_types import OffbeatError, WeightProof, WeightSyncError
from offbeat_weightsync import BucketPlan, describe_tensors


class ReplicaEngine(Protocol):
    """The engine as a replica's leader needs it; `EngineControl` is one."""

    def supports_partial_loading(self) -> bool:
        """Whether it can load some of the model's tensors at a time."""
        ...

    def begin_weights(self) -> None:
        """Stop serving until `finish_weights`."""
        ...

    def update_weights(self, handles: Mapping[str, str]) -> None:
        """Load the tensors behind the handles of each device."""
        ...

    def weight_arrivals(self) -> dict[str, list[str]]:
        """For each device a checksum of each flush since `begin_weights`, as its worker opened it."""
        ...

    def finish_weights(self, version: int) -> None:
        """Serve `version`."""
        ...


class ReplicaWeights:
    """Sends the trainer's weights to the engine of this rank's replica. All ranks of the mesh make it.

    Args:
        mesh: `dp` counts the replicas; the ranks that differ along any other axis make one.
        plan: the same on all ranks.
        engine: called on the replica's leader alone.
        handles: for the worker that shares this rank's device.
        has_vision: whether the model's config holds a `vision_config`. Models of language alone load in parts, and the
            engine is never asked; for the others it is asked once.
        deadline_s: for each step of all ranks, the engine's answer included; more than the engine's own, so that
            the error told is the engine's.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: BucketPlan,
        engine: ReplicaEngine,
        handles: HandleFormat,
        *,
        has_vision: bool,
        deadline_s: float = 600.0,
    ) -> None:
        self._group = mesh.group_except("dp")
        self._plan, self._engine, self._handles = plan, engine, handles
        self._in_parts = None if has_vision else True
        self._deadline_s = deadline_s

    @property
    def is_leader(self) -> bool:
        """Whether this rank talks to the engine."""
        return self._group.rank == 0

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> WeightProof:
        """Send all tensors of the plan, in its order; a call of all ranks of the replica.

        When it fails, the rest of `named_tensors` is still taken: where they are gathered from other ranks, other
        replicas depend on that. The engine then refuses to serve until a whole update arrives.

        Returns:
            What the engine's worker on this rank's device opened: one checksum for each flush.

        Raises:
            PeerFailedError: on all ranks of the replica: the engine refused or died, or another rank failed.
            WeightSyncError: on all ranks: a worker opened other bytes than were sent; here alone: this rank's own
                tensors are not those planned.
            MismatchError: the ranks differ in version or plan.
        """
        tensors = iter(named_tensors)
        try:
            return self._send(tensors, version)
        except Exception as error:
            _take_the_rest(tensors, error)
            raise

    def _send(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> WeightProof:
        self._group.check_equal(
            {"version": version, "plan": self._plan.digest}, what="policy version and plan", deadline_s=self._deadline_s
        )
        flushes = plan_flushes(self._plan, in_parts=self._loads_in_parts())
        self._decide(self._engine.begin_weights)
        checksums = [self._flush(tensors, indices) for indices in flushes]
        self._compare(self._decide(self._engine.weight_arrivals), checksums)
        self._decide(lambda: self._engine.finish_weights(version))
        return WeightProof(version=version, num_tensors=len(self._plan.specs), checksums=tuple(checksums))

    def _loads_in_parts(self) -> bool:
        if self._in_parts is None:
            self._in_parts = bool(self._decide(self._engine.supports_partial_loading))
        return self._in_parts

    def _flush(self, tensors: Iterator[tuple[str, Tensor]], indices: tuple[int, ...]) -> str:
        """Hand over the handles of some tensors; they are kept until the engine has loaded them."""
        packed, checksum, failure = self._pack(tensors, indices)
        message = {"error": str(failure)} if packed is None else {self._handles.device_id: packed.text}
        gathered: list[Any] | None = self._group.gather_data(message, deadline_s=self._deadline_s)
        try:
            self._decide(lambda: self._engine.update_weights(self._join(gathered or [])))
        except OffbeatError:
            if failure is not None:
                raise failure from None  # its own, rather than the leader's word of it
            raise
        assert packed is not None, "the leader goes on only if all ranks have packed"
        return checksum

    def _pack(
        self, tensors: Iterator[tuple[str, Tensor]], indices: tuple[int, ...]
    ) -> tuple[Packed | None, str, Exception | None]:
        """The handles of this rank and their checksum, or why there are none: the others hear of it at the leader."""
        try:
            named = [self._next(tensors, index) for index in indices]
            return self._handles.pack(named), tensors_checksum(named), None
        except Exception as error:  # noqa: BLE001 - raised again once all ranks have heard of it
            return None, "", error

    def _next(self, tensors: Iterator[tuple[str, Tensor]], index: int) -> tuple[str, Tensor]:
        spec = self._plan.specs[index]
        name, tensor = next(tensors, (None, None))
        if name is None or tensor is None:
            raise WeightSyncError(f"{spec.name}: planned, but the trainer's tensors ended before it")
        if describe_tensors([(name, tensor)]) != [spec]:
            got = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            raise WeightSyncError(f"{spec.name}: planned as {spec.dtype} {spec.shape}, the trainer gave {got}")
        return name, tensor

    def _join(self, gathered: list[dict[str, str]]) -> dict[str, str]:
        """The handles of all ranks; runs on the leader."""
        joined: dict[str, str] = {}
        for rank, message in zip(self._group.ranks, gathered, strict=True):
            if "error" in message:
                raise WeightSyncError(f"rank {rank}: {message['error']}")
            if joined.keys() & message.keys():
                raise WeightSyncError(f"rank {rank} shares the device {min(message)} with another rank of its replica")
            joined |= message
        return joined

    def _decide(self, fn: Callable[[], Any]) -> Any:
        return self._group.decide(fn, deadline_s=self._deadline_s)

    def _compare(self, arrived: Mapping[str, list[str]], sent: list[str]) -> None:
        """All ranks raise if the worker of one has not opened what was sent."""
        held = arrived.get(self._handles.device_id)
        complaint = ""
        if held is None:
            complaint = (
                f"no worker reports from {self._handles.device_id}; they do from {', '.join(arrived) or 'nowhere'}"
            )
        elif held != sent:
            wrong = [flush for flush, checksum in enumerate(sent) if held[flush : flush + 1] != [checksum]]
            complaint = (
                f"the worker on {self._handles.device_id} opened {len(held)} flushes of {len(sent)}, wrong: {wrong}"
            )
        for rank, text in zip(
            self._group.ranks, self._group.all_gather_data(complaint, deadline_s=self._deadline_s), strict=True
        ):
            if text:
                raise WeightSyncError(f"rank {rank}: {text}")


def _take_the_rest(tensors: Iterator[tuple[str, Tensor]], error: Exception) -> None:
    """Run the trainer's generator to its end, so that the ranks that gather with this one are not left alone."""
    try:
        for _ in tensors:
            pass
    except Exception as second:  # noqa: BLE001 - the first error is the one to tell
        error.add_note(f"and the rest of the trainer's tensors could not be taken: {second}")
