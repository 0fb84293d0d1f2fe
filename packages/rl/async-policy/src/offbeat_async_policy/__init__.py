"""When to generate, when to update, when to sync: the control logic of asynchronous RL, and its loop."""

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._loop import GroupResult, LoopBackend, LoopSummary, run_loop
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._state import Action, Drop, Finish, PolicyStatus, Statistics, Submit, Sync, Update

__all__ = [
    "Action",
    "AsyncConfig",
    "AsyncPolicy",
    "Drop",
    "Finish",
    "GroupResult",
    "LoopBackend",
    "LoopSummary",
    "PolicyStatus",
    "Statistics",
    "Submit",
    "Sync",
    "Update",
    "run_loop",
]
