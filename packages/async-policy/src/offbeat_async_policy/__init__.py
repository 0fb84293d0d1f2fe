"""When to generate, when to update, when to sync: the control logic of asynchronous RL, its loop and its simulator."""

from offbeat_async_policy._actions import Action, Drop, Finish, Submit, Sync, Update
from offbeat_async_policy._backend import GroupResult, LoopBackend
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._describe import PolicyStatus
from offbeat_async_policy._loop import LoopSummary, run_loop
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._simulate import Cluster, SimulationReport, Workload, simulate
from offbeat_async_policy._statistics import Statistics
from offbeat_async_policy._workload import DecodeCurve, Lengths

__all__ = [
    "Action",
    "AsyncConfig",
    "AsyncPolicy",
    "Cluster",
    "DecodeCurve",
    "Drop",
    "Finish",
    "GroupResult",
    "Lengths",
    "LoopBackend",
    "LoopSummary",
    "PolicyStatus",
    "SimulationReport",
    "Statistics",
    "Submit",
    "Sync",
    "Update",
    "Workload",
    "run_loop",
    "simulate",
]
