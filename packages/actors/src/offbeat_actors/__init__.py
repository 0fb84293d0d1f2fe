"""Starts the role processes of a run and calls them: typed RPC, deadlines, named failures. No torch."""

from offbeat_actors._group import call_all
from offbeat_actors._local import LocalLauncher
from offbeat_actors._machine import check_processes, split_threads
from offbeat_actors._spec import ActorHandle, ClusterConfig, Launcher, RoleSpec
from offbeat_placement import available_cpus

__all__ = [
    "ActorHandle",
    "ClusterConfig",
    "Launcher",
    "LocalLauncher",
    "RoleSpec",
    "available_cpus",
    "call_all",
    "check_processes",
    "split_threads",
]
