"""A group of ranks and its collectives on tensors."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.device_mesh import DeviceMesh

from offbeat_core import ConfigError, ShapeError
from offbeat_device import Device
from offbeat_mesh._calls import Calls, Membership, name_for_liveness, open_calls
from offbeat_mesh._plain_data import DataGroup
from offbeat_mesh._world import current_world

ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max", "product"]

REDUCE_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: the sum is divided here
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

NATIVE_DTYPES: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""Dtypes that every backend can reduce. Other dtypes are moved as bytes and cannot be reduced."""


# torch 2.13 gives the two a name without an underscore; 2.11 has the other.
_HAS_SINGLE: Final = hasattr(dist.ProcessGroup, "all_gather_single")
all_gather_single: Final = attrgetter("all_gather_single" if _HAS_SINGLE else "_allgather_base")
reduce_scatter_single: Final = attrgetter("reduce_scatter_single" if _HAS_SINGLE else "_reduce_scatter_base")


def to_flat(tensor: torch.Tensor) -> torch.Tensor:
    """[n], contiguous: a view where the tensor is, else a copy."""
    return tensor.detach().contiguous().view(-1)


def as_movable(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory, as bytes where the backend does not know the dtype."""
    return flat if flat.dtype in NATIVE_DTYPES else flat.view(torch.uint8)


def put_back(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Write what arrived into the caller's tensor, if it is not there already."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tensor


def describe(tensor: torch.Tensor, *, any_rows: bool = False) -> str:
    """Such as "float32[2, 3]", or "float32[*, 3]" for any number of rows."""
    sizes = ["*", *tensor.shape[1:]] if any_rows else tensor.shape
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, sizes))}]"


def gather_options(timeout: timedelta) -> AllgatherOptions:
    """Return the one operation of torch whose short form takes no timeout."""
    options = AllgatherOptions()
    options.timeout = timeout
    return options


def check_reduction(tensor: torch.Tensor, op: ReduceOp, group: str) -> None:
    """Refuse what a backend would compute differently from another, or not at all."""
    if op not in REDUCE_OPS:
        raise ConfigError(f"a reduction is one of {', '.join(REDUCE_OPS)}: got {op!r}")
    if tensor.dtype not in NATIVE_DTYPES or (op == "mean" and not tensor.is_floating_point()):
        wanted = "a floating-point dtype" if op == "mean" else "a float, or an int of 8, 32 or 64 bit"
        raise ShapeError(f"{op} over {group} needs {wanted}: got {describe(tensor)}; convert it before")


def check_rows(rows: torch.Tensor, size: int, what: str, *, like: torch.Tensor | None = None) -> None:
    """Refuse rows that are not one for each member, or not like the tensor they go to."""
    if rows.dim() == 0 or rows.shape[0] != size:
        raise ShapeError(f"{what} needs one row for each member, [{size}, ...]: got {describe(rows)}")
    if like is None:
        return
    if rows.shape[1:] != like.shape or rows.dtype != like.dtype or rows.device != like.device:
        raise ShapeError(f"each row of {what} must be like the output, {describe(like)}: got rows {describe(rows)}")


def check_parts(parts: Sequence[torch.Tensor], size: int, what: str) -> None:
    """Refuse parts that are not one for each member, alike but for their first dim."""
    kinds = {(part.dtype, part.device, part.shape[1:]) for part in parts}
    if len(parts) != size or len(kinds) != 1 or any(part.dim() == 0 for part in parts):
        listed = ", ".join(describe(part) for part in parts)
        raise ShapeError(f"{what} needs {size} parts that differ in their first dim alone: got {listed or 'none'}")


class Group(DataGroup):
    """The ranks that differ from this one only along some axes, in ascending order. `Mesh.group` makes it.

    Every source, destination and rank in a call is group-relative: 0 to size - 1, never a global rank. All members
    make the same calls in the same order; in return every call ends, well or with an error that names a rank, within
    its deadline (`deadline_s` of the call, for the members to come; None takes the group's). A member that fails in a
    call, or dies, makes the other members' calls raise within seconds; after that the group refuses every call with
    the same error. One thread uses a group; a second one takes a channel.

    What is always checked, before anything is sent: the axis rule, the thread, the arguments against this rank's own
    tensors. Whether the *members'* tensors agree is checked for plain data always (it travels with the header), and
    for tensors only with `Mesh(check=True)` or OFFBEAT_CHECK=1: the check is one more small collective, which makes a
    small all_reduce take three to four times as long (4 bytes, 2 gloo ranks: 0.25 ms, checked 0.9 ms). Without it
    gloo ends the process of a member whose sizes differ, and the others raise PeerFailedError naming it.

    The tensors of a call have one shape and dtype on all members, any stride, and stay on their device; a "mean" needs
    floating-point ones. On a device whose queue runs ahead of the host (a GPU), a call returns when the operation is
    queued, and its timeout is the backend's.

    Attributes:
        axes: in the mesh's order, without repeats.
    """

    def __init__(
        self,
        axes: Sequence[str],
        calls: Calls,
        process_group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        device: Device,
        *,
        check: bool = False,
    ) -> None:
        super().__init__(calls, control)
        self.axes = tuple(axes)
        self._process_group = process_group
        self._device = device
        self._check = check

    def __repr__(self) -> str:
        return f"Group({self._calls.text}, rank {self.rank} of {self.size})"

    @classmethod
    def adopt(
        cls,
        process_group: dist.ProcessGroup,
        *,
        axes: Sequence[str],
        deadline_s: float | None = None,
        check: bool = False,
    ) -> "Group":
        """Return a group over a process group that other code has made; all its members call this.

        Args:
            process_group: of torch; its owner destroys it.
            axes: what it spans, for errors and verdicts; guards are decided over its ranks whatever its name.
            deadline_s: for each call that does not bring its own; the world's by default.
            check: compare the members' tensors before each call.

        Raises:
            ConfigError: the world has not been joined.
        """
        world = current_world()
        if world is None:
            raise ConfigError(
                "adopting a process group needs the world's control connection: call join_world() on all ranks first"
            )
        membership = Membership(
            key=f"adopted/{process_group.group_name}",
            axes=tuple(axes),
            ranks=tuple(dist.get_process_group_ranks(process_group)),
            rank=world.rank,
        )
        name_for_liveness(process_group, axes)
        calls, control = open_calls(process_group, world, membership, deadline_s or world.deadline_s)
        return cls(axes, calls, process_group, control, world.device, check=check)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch process group, for libraries that want one.

        Raises:
            ConfigError: no world has been joined, so torch has none.
        """
        if self._process_group is None:
            raise ConfigError(
                f"{self._calls.text} has no torch process group: call join_world() before making the mesh"
            )
        return self._process_group

    @property
    def device_mesh(self) -> DeviceMesh:
        """A one-dimensional torch DeviceMesh over the group, such as FSDP takes; its dim is "dp_cp" for dp and cp."""
        name = "_".join(self.axes) or "self"
        return DeviceMesh.from_group(
            self.process_group, self._device.torch_device.type, mesh=torch.tensor(self.ranks), mesh_dim_names=(name,)
        )

    def barrier(self, *, deadline_s: float | None = None) -> None:
        """Wait until all members have come."""
        with self._calls.call("barrier", deadline_s):
            self._exchange.agree("barrier")

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, deadline_s: float | None = None) -> torch.Tensor:
        """Overwrite `tensor` with the source's, on all members, and return it."""
        with self._calls.call("broadcast", deadline_s):
            self._check_member("source", source)
            self._agree("broadcast", tensor, source)
            flat = as_movable(to_flat(tensor))
            self._run(flat, lambda group, timeout: group.broadcast(flat, source, timeout))
            return put_back(tensor, flat)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, deadline_s: float | None = None
    ) -> torch.Tensor:
        """Overwrite `tensor` with the reduction over all members, on all of them, and return it."""
        with self._calls.call("all_reduce", deadline_s):
            check_reduction(tensor, op, self._calls.text)
            self._agree(f"all_reduce {op}", tensor)
            flat = to_flat(tensor)
            self._run(flat, lambda group, timeout: group.allreduce(flat, REDUCE_OPS[op], timeout))
            return put_back(tensor, self._averaged(flat, op))

    def reduce(
        self, tensor: torch.Tensor, destination: int = 0, op: ReduceOp = "sum", *, deadline_s: float | None = None
    ) -> torch.Tensor | None:
        """Return the reduction over all members on the destination, None on the others; `tensor` is left as it is."""
        with self._calls.call("reduce", deadline_s):
            self._check_member("destination", destination)
            check_reduction(tensor, op, self._calls.text)
            self._agree(f"reduce {op}", tensor, destination)
            result = tensor.detach().clone(memory_format=torch.contiguous_format)
            flat = result.view(-1)  # the backend computes in it, on every member
            self._run(flat, lambda group, timeout: group.reduce(flat, destination, REDUCE_OPS[op], timeout))
            self._averaged(flat, op)
            return result if self.rank == destination else None

    def all_gather(self, tensor: torch.Tensor, *, deadline_s: float | None = None) -> torch.Tensor:
        """Every member's tensor, on all members: [size, ...], row i is member i's."""
        with self._calls.call("all_gather", deadline_s):
            self._agree("all_gather", tensor)
            rows = tensor.new_empty((self.size, *tensor.shape))
            own, flat = as_movable(to_flat(tensor)), as_movable(rows.view(-1))
            self._run(own, lambda group, timeout: all_gather_single(group)(flat, own, gather_options(timeout)))
            return rows if self.size > 1 else rows.copy_(tensor.detach().unsqueeze(0))

    def gather(
        self, tensor: torch.Tensor, destination: int = 0, *, deadline_s: float | None = None
    ) -> torch.Tensor | None:
        """Every member's tensor, on the destination: [size, ...], row i is member i's; None on the others."""
        with self._calls.call("gather", deadline_s):
            self._check_member("destination", destination)
            self._agree("gather", tensor, destination)
            own = as_movable(to_flat(tensor))
            if self.rank != destination:
                self._run(own, lambda group, timeout: group.gather([], own, destination, timeout))
                return None
            rows = tensor.new_empty((self.size, *tensor.shape))
            flat_rows = [as_movable(row.view(-1)) for row in rows]
            self._run(own, lambda group, timeout: group.gather(flat_rows, own, destination, timeout))
            return rows if self.size > 1 else rows.copy_(tensor.detach().unsqueeze(0))

    def scatter(
        self,
        output: torch.Tensor,
        rows: torch.Tensor | None = None,
        source: int = 0,
        *,
        deadline_s: float | None = None,
    ) -> torch.Tensor:
        """Overwrite `output` with this member's row of the source's `rows`, [size, ...] there, and return it."""
        with self._calls.call("scatter", deadline_s):
            self._check_member("source", source)
            given = self._rows_to_scatter(rows, output) if self.rank == source else []
            self._agree("scatter", output, source)
            flat = as_movable(to_flat(output))
            self._run(flat, lambda group, timeout: group.scatter(flat, given, source, timeout))
            return put_back(output, flat if self.size > 1 else given[0])

    def reduce_scatter(
        self, rows: torch.Tensor, op: ReduceOp = "sum", *, deadline_s: float | None = None
    ) -> torch.Tensor:
        """Reduce `rows`, [size, ...], over all members, and give row i of the result to member i."""
        with self._calls.call("reduce_scatter", deadline_s):
            check_rows(rows, self.size, f"reduce_scatter over {self._calls.text}")
            check_reduction(rows, op, self._calls.text)
            self._agree(f"reduce_scatter {op}", rows)
            result = rows.new_empty(rows.shape[1:])
            own, flat = to_flat(rows), result.view(-1)
            options = ReduceScatterOptions()
            options.reduceOp = dist.ReduceOp(REDUCE_OPS[op])
            options.timeout = self._calls.backend_timeout()
            self._run(flat, lambda group, _: reduce_scatter_single(group)(flat, own, options))
            if self.size == 1:
                flat.copy_(own)
            self._averaged(flat, op)
            return result

    def all_to_all_rows(self, rows: torch.Tensor, *, deadline_s: float | None = None) -> torch.Tensor:
        """Give row i of `rows`, [size, ...], to member i; return the rows that all have for this one, likewise.

        As `all_to_all` with parts of one size, which need not be counted first.
        """
        with self._calls.call("all_to_all_rows", deadline_s):
            check_rows(rows, self.size, f"all_to_all_rows over {self._calls.text}")
            self._agree("all_to_all_rows", rows)
            result = rows.new_empty(rows.shape)
            own, flat = as_movable(to_flat(rows)), as_movable(result.view(-1))
            self._run(flat, lambda group, timeout: group.alltoall_base(flat, own, [], [], timeout))
            return result if self.size > 1 else result.copy_(rows.detach())

    def all_to_all(self, rows: Sequence[torch.Tensor], *, deadline_s: float | None = None) -> list[torch.Tensor]:
        """Give part i to member i, and take member j's part for this one: [n_i, ...], of any number of rows."""
        with self._calls.call("all_to_all", deadline_s):
            check_parts(rows, self.size, f"all_to_all over {self._calls.text}")
            kind = f" of {describe(rows[0], any_rows=True)}" if self._check else ""
            counts = self._exchange.agree_on_counts(f"all_to_all{kind}", [len(part) for part in rows])
            coming = [sent[self.rank] for sent in counts]
            own = torch.cat([part.detach() for part in rows])
            return list(torch.split(self._move_runs(own, [len(part) for part in rows], coming), coming))

    def all_to_all_runs(
        self, rows: torch.Tensor, sent: Sequence[int], coming: Sequence[int], *, deadline_s: float | None = None
    ) -> torch.Tensor:
        """Give runs of rows to the members, one after the other; return the runs that they have for this one.

        As `all_to_all` of parts that lie in one tensor, whose numbers of rows all members know.

        Args:
            rows: [sum of `sent`, ...].
            sent: rows for each member.
            coming: rows that each member has for this one.
            deadline_s: see `Group`.
        """
        with self._calls.call("all_to_all_runs", deadline_s):
            what = f"all_to_all_runs over {self._calls.text}"
            if len(sent) != self.size or len(coming) != self.size or sum(sent) != len(rows):
                raise ShapeError(f"{what} needs {self.size} runs of {len(rows)} rows in all: got {sent}, for {coming}")
            if self._check:
                kind = f"all_to_all_runs of {describe(rows, any_rows=True)}"
                counts = self._exchange.agree_on_counts(kind, [*sent, *coming])
                given, wanted = ([each[part] for each in counts] for part in (slice(self.size), slice(self.size, None)))
                if given != [list(column) for column in zip(*wanted, strict=True)]:
                    raise ShapeError(f"{what}: members give {given} rows to each, and wait for {wanted} from each")
            return self._move_runs(rows.detach().contiguous(), sent, coming)

    def _move_runs(self, own: torch.Tensor, sent: Sequence[int], coming: Sequence[int]) -> torch.Tensor:
        result = own.new_empty((sum(coming), *own.shape[1:]))
        width = own[:1].numel() if len(own) else result[:1].numel()
        given, flat = as_movable(own.view(-1)), as_movable(result.view(-1))
        scale = width * (own.element_size() // given.element_size())
        splits_in, splits_out = [count * scale for count in sent], [count * scale for count in coming]
        self._run(flat, lambda group, timeout: group.alltoall_base(flat, given, splits_out, splits_in, timeout))
        if self.size == 1:
            flat.copy_(given)
        return result

    def send(self, tensor: torch.Tensor, destination: int, *, deadline_s: float | None = None) -> None:
        """Send a tensor to one member (group-relative), which calls `recv` with one of that shape and dtype."""
        with self._calls.call("send", deadline_s, collective=False):
            self._check_member("destination", destination, other=True)
            flat = as_movable(to_flat(tensor))
            work = dist.isend(flat, group=self.process_group, group_dst=destination)
            self._wait(flat, work, peer=self.ranks[destination])

    def recv(self, tensor: torch.Tensor, source: int, *, deadline_s: float | None = None) -> torch.Tensor:
        """Overwrite `tensor` with the one that a member (group-relative) sends, and return it."""
        with self._calls.call("recv", deadline_s, collective=False):
            self._check_member("source", source, other=True)
            flat = as_movable(to_flat(tensor))
            work = dist.irecv(flat, group=self.process_group, group_src=source)
            self._wait(flat, work, peer=self.ranks[source])
            return put_back(tensor, flat)

    def _run(self, tensor: torch.Tensor, start: Callable[[dist.ProcessGroup, timedelta], dist.Work]) -> None:
        """Start an operation and wait for it; a group of one has nothing to do."""
        if self.size > 1:
            self._wait(tensor, start(self.process_group, self._calls.backend_timeout()))

    def _wait(self, tensor: torch.Tensor, work: dist.Work | None, peer: int | None = None) -> None:
        if tensor.is_cpu:
            self._calls.wait(work, peer)
        elif work is not None:
            work.wait()  # the device's stream waits; the host continues, and the backend keeps the timeout

    def _agree(self, call: str, tensor: torch.Tensor, root: int = 0) -> None:
        """Make sure, on request, that the members are in one call, with tensors of one shape and dtype."""
        if self._check:
            self._exchange.agree(f"{call} of {describe(tensor)}", root)

    def _rows_to_scatter(self, rows: torch.Tensor | None, output: torch.Tensor) -> list[torch.Tensor]:
        """Return the source's rows, flat."""
        what = f"scatter over {self._calls.text}"
        if rows is None:
            raise ShapeError(f"{what} needs rows on the source: got none")
        check_rows(rows, self.size, what, like=output)
        return [as_movable(row.view(-1)) for row in rows.detach().contiguous()]

    def _averaged(self, flat: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return flat.div_(self.size) if op == "mean" else flat
