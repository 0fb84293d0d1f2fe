"""Rendezvous of ranks that one process starts: it keeps the store, and gives each rank its number."""

from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

import offbeat_liveness as liveness
from offbeat_mesh._mesh import Mesh
from offbeat_mesh._world import join_world, open_store


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Rank of a process, and where the ranks meet. Plain data: it travels to the process that it is for.

    Args:
        rank: in [0, size).
        size: how many ranks.
        host, port: of the store.
        start_deadline_s: for the ranks to come.
        call_deadline_s: for each of their calls among themselves.
    """

    rank: int
    size: int
    host: str
    port: int
    start_deadline_s: float = 300.0
    call_deadline_s: float = 7200.0

    def join(
        self,
        device: str,
        *,
        name: str,
        stall_after_s: float,
        dumps: str | None = None,
        policy: liveness.Policy = "abort",
    ) -> Mesh:
        """Meet the other ranks, and watch over what they do together.

        Args:
            device: of this rank.
            name: of this process, such as "trainer-0".
            stall_after_s: a rank that waits longer than this for another ends all of them, and its log names
                those that did not come.
            dumps: folder for what the monitor finds; None writes none.
            policy: of the monitor; "replace" where a rank that dies is replaced, and the others live on.

        Returns:
            All ranks along dp, for a training engine to factor further.
        """
        liveness.watch(stall_after_s, policy, dumps, name=name)
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.start_deadline_s))
        join_world(rank=self.rank, size=self.size, store=store, device=device, deadline_s=self.start_deadline_s)
        return Mesh(dp=self.size, deadline_s=self.call_deadline_s)


def open_rendezvous(
    host: str, size: int, *, start_deadline_s: float = 300.0, call_deadline_s: float = 7200.0
) -> tuple[TCPStore, list[Rendezvous]]:
    """Open the place where ranks will meet, in the process that starts them.

    Args:
        host: an address of this machine that the ranks reach.
        size: how many there will be.
        start_deadline_s: for the ranks to come.
        call_deadline_s: for each of their calls among themselves.

    Returns:
        The store, to be kept for as long as the ranks live, and each rank's rendezvous.
    """
    store = open_store(host, deadline_s=start_deadline_s)
    deadlines = {"start_deadline_s": start_deadline_s, "call_deadline_s": call_deadline_s}
    return store, [Rendezvous(rank=rank, size=size, host=host, port=store.port, **deadlines) for rank in range(size)]
