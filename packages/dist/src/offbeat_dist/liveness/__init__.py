"""Says who waits for whom, where and why, when a distributed run stands still."""

from offbeat_dist.liveness._head import CallSite, Collective, Head
from offbeat_dist.liveness._ledger import waiting
from offbeat_dist.liveness._monitor import Monitor
from offbeat_dist.liveness._verdict import Link, Party, Verdict
from offbeat_dist.liveness._watch import current_monitor, watch
from offbeat_dist.liveness._world_view import name_group, recent_collectives

__all__ = [
    "CallSite",
    "Collective",
    "Head",
    "Link",
    "Monitor",
    "Party",
    "Verdict",
    "current_monitor",
    "name_group",
    "recent_collectives",
    "waiting",
    "watch",
]
