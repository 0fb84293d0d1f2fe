"""Liveness of a run: whoever is watched has the roles that it starts watched too, under their own names."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

import offbeat_liveness as liveness

_MEETING: Final = "OFFBEAT_LIVENESS_MEETING"
_STALL_AFTER: Final = "OFFBEAT_STALL_AFTER_S"
_POLICY: Final = "OFFBEAT_LIVENESS_POLICY"


def declare_wait(name: str, on: str, deadline_s: float) -> AbstractContextManager[None]:
    """Make a call an edge in the graph of who waits for whom.

    Args:
        name: of the wait, such as "rollout-1.sleep".
        on: the role that has to answer, by the name it is watched under.
        deadline_s: seconds it may take.
    """
    return liveness.waiting(name, on=on, deadline_s=deadline_s)


def invite(host: str, policy: str) -> Mapping[str, str]:
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
    stall_after_s = str(monitor.settings.stall_after_s)
    return {**monitor.invite(host), _STALL_AFTER: stall_after_s, _POLICY: policy}


def watch_role(name: str) -> None:
    """Watch this process as the role of this name, if it was invited."""
    if not os.environ.get(_MEETING):
        return
    known = liveness.current_monitor()
    if known is not None and known.settings.name != name:  # of the driver that this is a fork of
        known.close()
    liveness.watch(name=name)
