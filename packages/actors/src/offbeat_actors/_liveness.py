"""Liveness of a run: whoever is watched has the roles that it starts watched too, under their own names."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import offbeat_liveness as liveness


def declare_wait(name: str, on: str, deadline_s: float) -> AbstractContextManager[None]:
    """Make a call an edge in the graph of who waits for whom.

    Args:
        name: of the wait, such as "rollout-1.sleep".
        on: the role that has to answer, by the name it is watched under.
        deadline_s: seconds it may take.
    """
    return liveness.waiting(name, on=on, deadline_s=deadline_s)


def invite(host: str, policy: liveness.Policy) -> Mapping[str, str]:
    """Environment variables by which a role is watched, and meets this process and through it the other roles.

    Args:
        host: IP address of this machine, as the role's machine sees it.
        policy: of the role's monitor.

    Returns:
        None where nobody watches this process.
    """
    monitor = liveness.current_monitor()
    if monitor is None:
        return {}
    return monitor.invite(host, policy=policy)
