"""The choice of a transport: CUDA IPC or nccl is settled before a run, shared memory or TCP for each sync."""

from pathlib import Path

from offbeat_weightsync._addresses import TcpAddress
from offbeat_weightsync._plan import BucketPlan
from offbeat_weightsync._sender import WeightSender
from offbeat_weightsync._transport import Route, Transport
from offbeat_weightsync._transports.group import GroupTransport
from offbeat_weightsync._transports.shared_memory import CudaIpcTransport, SharedMemorySender
from offbeat_weightsync._transports.tcp import TcpSender


class AutoTransport(Transport):
    """From device to device where engines load from theirs, else by shared memory on one machine, else by TCP."""

    reach = "either"

    @classmethod
    def settle(cls, name: str, route: Route) -> str:
        """Return "cuda-ipc" where a trainer rank is on each engine's CUDA device, "nccl" where none share theirs.

        Changed elements are found on the host, so they go by its memory.
        """
        ends = (*route.senders, *route.receivers)
        if route.sends_changes or not route.loads_on_device or not all(each.has_ipc for each in ends):
            return name
        if not CudaIpcTransport.complaint(route):
            return "cuda-ipc"
        # Devices that no plan has given out may be the same, which nccl refuses.
        are_known = all(each.index is not None for each in ends)
        return "nccl" if are_known and not GroupTransport.complaint(route) else name

    @classmethod
    def describe(cls, route: Route) -> str:
        """Return which of them, and why."""
        if (other := route.elsewhere) is None:
            return "by shared memory: all engines are on the trainer's machine"
        return f"by TCP: an engine is on {other.node}, the trainer on {route.sender.node}"

    def open_sender(self, address: str, plan: BucketPlan, *, name: str = "trainer-0") -> WeightSender:
        """Listen over TCP if the address names a host, otherwise by shared memory."""
        return open_sender(address, plan, name=name)


def open_sender(
    address: str | Path,
    plan: BucketPlan,
    *,
    deadline_s: float = 300.0,
    name: str = "trainer-0",
    device: str | None = None,
) -> WeightSender:
    """Listen at an address from `new_address`: over TCP if it names a host, otherwise by shared memory.

    Args:
        address: where to listen. Give receivers the sender's own `address`, which has the port.
        plan: the tensors, in the order in which they will be given, and the dtypes in which they travel.
        deadline_s: time allowed for each sync, from `send` to the last proof.
        name: this side, for the receivers' errors.
        device: of what is on its way, on this machine: see `SharedMemorySender`.

    Raises:
        WeightSyncError: the address is in use, or no address; there is not enough memory, or no such device.
    """
    if TcpAddress.parse(str(address)) is None:
        return SharedMemorySender(address, plan, deadline_s=deadline_s, name=name, device=device)
    return TcpSender(str(address), plan, deadline_s=deadline_s, name=name)
