"""Reads off a thread's stack which call of torch.distributed it stands in, and with which arguments.

This finds what no recorder writes down (`monitored_barrier`, `new_group`, `init_process_group`, and every collective
when the flight recorder is off) without any cost before somebody looks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.process_groups import default_group, group_members, store_place

C10D_FILE: Final = "torch/distributed/distributed_c10d.py"
POINT_TO_POINT: Final = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
RENDEZVOUS: Final = frozenset(
    {
        "destroy_process_group", "init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
        "split_group", "_store_based_barrier", "_new_process_group_helper",
    }
)  # fmt: skip
COLLECTIVES: Final = frozenset(
    {
        "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
        "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_tensor", "scatter", "scatter_object_list",
    }
)  # fmt: skip
BLOCKING: Final = POINT_TO_POINT | RENDEZVOUS | COLLECTIVES | {"monitored_barrier"}
STORE_RENDEZVOUS: Final = frozenset(
    {
        "rendezvous",
        "_create_c10d_store",
        "_env_rendezvous_handler",
        "_file_rendezvous_handler",
        "_tcp_rendezvous_handler",
    }
)
FUNCTIONAL: Final = frozenset({"wait_tensor"})
REMOTE_CALLS: Final = frozenset({"init_rpc", "rpc_sync", "shutdown", "_all_gather", "_barrier", "_wait_all_workers"})
STATELESS: Final = frozenset(
    {"all_gather_obj", "barrier", "broadcast", "broadcast_obj", "recv", "recv_obj", "send", "send_obj"}
)
CALLS: Final = {
    C10D_FILE: BLOCKING,
    "torch/distributed/rendezvous.py": STORE_RENDEZVOUS,
    "torch/distributed/_functional_collectives.py": FUNCTIONAL,
    "torch/distributed/rpc/__init__.py": REMOTE_CALLS,
    "torch/distributed/rpc/api.py": REMOTE_CALLS,
    "vllm/distributed/utils.py": STATELESS,
}
"""Calls that may stand for long, by the file that they are defined in."""
LIBRARIES: Final = ("torch/distributed", "vllm/distributed/utils.py")


@dataclass(frozen=True, kw_only=True)
class TorchCall:
    """A call of torch.distributed, or of a library of groups without it, on a thread's stack.

    Args:
        function: the outermost one, which the user called.
        file: the end of the path of the file that defines it, one of `CALLS`.
        group: its process group object; None means the default group.
        peer: global rank of the other side, root or source, if the call has one.
        arguments: its local names, as they are now.
        place: "host:port" or path of the store that it meets the others at, if the stack tells.
        invited: the ranks that the innermost call of its kind was asked for: those of a new group.
    """

    function: str
    file: str = C10D_FILE
    group: Any
    peer: int | None
    arguments: dict[str, Any]
    place: str = ""
    invited: tuple[int, ...] = ()


def torch_call(frame: FrameType | None) -> TorchCall | None:
    """The call of torch.distributed that a thread stands in, None if it stands in none."""
    found: list[tuple[str, FrameType]] = []
    while frame is not None:
        file = _defined_in(frame)
        if file:
            found.append((file, frame))
        elif found and not any(each in frame.f_code.co_filename for each in LIBRARIES):
            break
        frame = frame.f_back
    return _call_of(found) if found else None


def _defined_in(frame: FrameType) -> str:
    """The file, of those in `CALLS`, that has the function of a frame among its calls; "" for none."""
    code = frame.f_code
    return next(
        (file for file, names in CALLS.items() if code.co_name in names and code.co_filename.endswith(file)), ""
    )


def _call_of(found: list[tuple[str, FrameType]]) -> TorchCall:
    """What the frames of one call say, innermost first."""
    file, outermost = found[-1]
    named = dict(outermost.f_locals)
    group = named.get("group") or named.get("process_group")
    peers = (named.get(name) for name in ("src", "dst"))
    peer = next((peer for peer in peers if isinstance(peer, int)), None)
    if peer is None and file == C10D_FILE:
        peer = _global_rank(named, group)
    locals_of_all = [each.f_locals for _, each in found]
    invited = (each.get("ranks") for each in locals_of_all)
    return TorchCall(
        function=outermost.f_code.co_name,
        file=file,
        group=group,
        peer=peer,
        arguments=named,
        place=next((text for text in map(_place_in, locals_of_all) if text), ""),
        invited=next((tuple(each) for each in invited if isinstance(each, list | tuple | range) and each), ()),
    )


def _place_in(named: Mapping[str, Any]) -> str:
    """Where the others are met, as the local names of a frame have it."""
    host = named.get("hostname") or named.get("master_addr")
    port = named.get("port") or named.get("master_port")
    if host and port:
        return f"{host}:{port}"
    return str(named.get("path") or "") if "url" in named else ""


def stateless_place(call: TorchCall) -> str:
    """Where a group without torch's tables meets: the address of its store."""
    store = getattr(call.arguments.get("self"), "store", None)
    return store_place(store) if store is not None else ""


def _global_rank(named: Mapping[str, Any], group: Any) -> int | None:
    """Of the other side, where the call counts it within its group."""
    members = group_members(default_group() if group is None else group)
    places = (named.get(name) for name in ("group_src", "group_dst"))
    return next((members[place] for place in places if isinstance(place, int) and place < len(members)), None)
