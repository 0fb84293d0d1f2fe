"""When to generate, when to update, when to sync: the control logic of asynchronous RL, and its loop."""

from offbeat_async_policy._clock import Busy, BusyClock, BusyShares
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._loop import GroupResult, LoopBackend, LoopSummary, run_loop
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._state import Action, Drop, Finish, PolicyStatus, Statistics, Submit, Sync, Update
from offbeat_async_policy._turn import TrainerTurn

__all__ = [
    "Action",
    "AsyncConfig",
    "AsyncPolicy",
    "Busy",
    "BusyClock",
    "BusyShares",
    "Drop",
    "Finish",
    "GroupResult",
    "LoopBackend",
    "LoopSummary",
    "PolicyStatus",
    "Statistics",
    "Submit",
    "Sync",
    "TrainerTurn",
    "Update",
    "run_loop",
]
