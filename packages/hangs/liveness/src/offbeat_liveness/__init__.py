"""Monitor that reports which process waits for which, where and why, when a distributed run hangs."""

from offbeat_liveness._diagnosis.verdict import Link, Party, Verdict
from offbeat_liveness._monitor import Monitor
from offbeat_liveness._process.ledger import waiting
from offbeat_liveness._process.process_groups import name_group, recent_collectives, settled_collectives
from offbeat_liveness._process.snapshot import CallSite, Collective, ProcessSnapshot
from offbeat_liveness._process.stacks import current_frames
from offbeat_liveness._settings import LivenessError, Policy
from offbeat_liveness._watch import current_monitor, watch, watch_if_invited

__all__ = [
    "CallSite",
    "Collective",
    "Link",
    "LivenessError",
    "Monitor",
    "Party",
    "Policy",
    "ProcessSnapshot",
    "Verdict",
    "current_frames",
    "current_monitor",
    "name_group",
    "recent_collectives",
    "settled_collectives",
    "waiting",
    "watch",
    "watch_if_invited",
]
