"""Waits for roles, told to the liveness monitor of this process."""

import sys
from contextlib import AbstractContextManager, nullcontext


def declare_wait(name: str, on: str, deadline_s: float) -> AbstractContextManager[None]:
    """Make a call an edge in the graph of who waits for whom, where the process has loaded offbeat-dist's monitor.

    Args:
        name: of the wait, such as "rollout-1.sleep".
        on: the role that has to answer, by the name it watches itself under.
        deadline_s: seconds it may take.
    """
    liveness = sys.modules.get("offbeat_dist.liveness")  # never imported from here: it is of use only when it watches
    if liveness is None:
        return nullcontext()
    wait: AbstractContextManager[None] = liveness.waiting(name, on=on, deadline_s=deadline_s)
    return wait
