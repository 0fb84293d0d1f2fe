"""Starts the processes of a run, calls them, watches over them: typed calls, deadlines, restart budgets. No torch."""

from offbeat_actors._actor import ActorHandle
from offbeat_actors._failures import read_log_tail
from offbeat_actors._launcher import Launcher, run_on_driver
from offbeat_actors._local import LocalLauncher
from offbeat_actors._processes.machine import check_processes, split_threads
from offbeat_actors._resources import check_kinds, cluster_request, find_view
from offbeat_actors._spec import ClusterConfig, RolePlace, RoleSpec, RoleState
from offbeat_actors._supervision.group import ActorGroup, call_all, gather_or_cancel, start_all, start_ranks
from offbeat_actors._supervision.on_call import RoleOnCall
from offbeat_actors._supervision.pool import KeepAlive, Member, Pool
from offbeat_actors._supervision.supervision import Ask, Notify, RestartBudget, StuckError, start_again, wait_gone
from offbeat_placement import available_cpus

__all__ = [
    "ActorGroup",
    "ActorHandle",
    "Ask",
    "ClusterConfig",
    "KeepAlive",
    "Launcher",
    "LocalLauncher",
    "Member",
    "Notify",
    "Pool",
    "RestartBudget",
    "RoleOnCall",
    "RolePlace",
    "RoleSpec",
    "RoleState",
    "StuckError",
    "available_cpus",
    "call_all",
    "check_kinds",
    "check_processes",
    "cluster_request",
    "find_view",
    "gather_or_cancel",
    "read_log_tail",
    "run_on_driver",
    "split_threads",
    "start_again",
    "start_all",
    "start_ranks",
    "wait_gone",
]
