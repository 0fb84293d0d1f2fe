"""The place of a trainer process among the ranks of the trainer."""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat_mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Which rank a process is, and where the ranks meet.

    Args:
        rank: in [0, size).
        size: how many ranks.
        host, port: of the store that the driver holds.
        start_deadline_s: for the ranks to come.
        call_deadline_s: for each of their calls among themselves.
    """

    rank: int = 0
    size: int = 1
    host: str = ""
    port: int = 0
    start_deadline_s: float = 300.0
    call_deadline_s: float = 7200.0

    def join(self, device: str, stall_after_s: float) -> "Mesh | None":
        """Meet the other ranks, and watch over what they do together; None for a trainer of one process.

        Who starts the ranks shows each of them devices of its own, so all take the same one by name. A rank that waits
        for another longer than `stall_after_s` ends all of them, and its log says who did not come.
        """
        if self.size == 1:
            return None
        from torch._C._distributed_c10d import TCPStore

        import offbeat_liveness as liveness
        from offbeat_mesh import Mesh, join_world

        liveness.watch(stall_after_s=stall_after_s, policy="abort", name=f"trainer-{self.rank}")
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.start_deadline_s))
        join_world(rank=self.rank, size=self.size, store=store, device=device, deadline_s=self.start_deadline_s)
        return Mesh(dp=self.size, deadline_s=self.call_deadline_s)


def leave(error: BaseException | None = None) -> None:
    """Leave the other ranks, if there are any."""
    from offbeat_mesh import current_world

    world = current_world()
    if world is not None:
        world.leave(error)
