"""Reads off a thread's stack which call of torch.distributed it stands in, and with which arguments.

This finds what no recorder writes down (`monitored_barrier`, `new_group`, `init_process_group`, and every collective
when the flight
recorder is off) without any cost before somebody looks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.process_groups import default_group, group_members
from offbeat_liveness._process.stacks import main_thread_ident, thread_frames

C10D_FILE: Final = "torch/distributed/distributed_c10d.py"
POINT_TO_POINT: Final = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
RENDEZVOUS: Final = frozenset({"init_process_group", "new_group", "split_group", "new_subgroups"})
COLLECTIVES: Final = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_tensor", "scatter", "scatter_object_list",
    }
)  # fmt: skip
BLOCKING: Final = POINT_TO_POINT | RENDEZVOUS | COLLECTIVES | {"monitored_barrier"}


@dataclass(frozen=True, kw_only=True)
class TorchCall:
    """A call of torch.distributed on a thread's stack.

    Args:
        function: the outermost one, which the user called.
        group: its process group object; None means the default group.
        peer: global rank of the other side, root or source, if the call has one.
        arguments: its local names, as they are now.
    """

    function: str
    group: Any
    peer: int | None
    arguments: dict[str, Any]


def torch_call(frame: FrameType | None) -> TorchCall | None:
    """The call of torch.distributed that a thread stands in, None if it stands in none."""
    found: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(C10D_FILE) and code.co_name in BLOCKING:
            found = frame
        elif found is not None and "torch/distributed" not in code.co_filename:
            break
        frame = frame.f_back
    if found is None:
        return None
    named = dict(found.f_locals)
    group = named.get("group") or named.get("process_group")
    peers = (named.get(name) for name in ("src", "dst"))
    peer = next((peer for peer in peers if isinstance(peer, int)), None)
    return TorchCall(
        function=found.f_code.co_name,
        group=group,
        peer=_global_rank(named, group) if peer is None else peer,
        arguments=named,
    )


def _global_rank(named: Mapping[str, Any], group: Any) -> int | None:
    """Of the other side, where the call counts it within its group."""
    members = group_members(default_group() if group is None else group)
    places = (named.get(name) for name in ("group_src", "group_dst"))
    return next((members[place] for place in places if isinstance(place, int) and place < len(members)), None)


def is_in_torch_call() -> bool:
    """Whether the main thread stands in a call of torch.distributed."""
    return torch_call(thread_frames().get(main_thread_ident())) is not None
