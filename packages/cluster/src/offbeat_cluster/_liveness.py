"""What the liveness monitor of this process is told, where there is one: waits for roles, and who is started."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType


def declare_wait(name: str, on: str, deadline_s: float) -> AbstractContextManager[None]:
    """Make a call an edge in the graph of who waits for whom, where the process has loaded offbeat-mesh's monitor.

    Args:
        name: of the wait, such as "rollout-1.sleep".
        on: the role that has to answer, by the name it watches itself under.
        deadline_s: seconds it may take.
    """
    liveness = _loaded()
    if liveness is None:
        return nullcontext()
    wait: AbstractContextManager[None] = liveness.waiting(name, on=on, deadline_s=deadline_s)
    return wait


def invite(host: str) -> Mapping[str, str]:
    """Environment variables by which a role that watches itself meets this process, and through it the other roles.

    Args:
        host: IP address of this machine, as the role's machine sees it.
    """
    liveness = _loaded()
    monitor = liveness.current_monitor() if liveness else None
    return monitor.invite(host) if monitor else {}


def _loaded() -> ModuleType | None:
    """Never imported from here: it is of use only when it watches."""
    return sys.modules.get("offbeat_liveness")
