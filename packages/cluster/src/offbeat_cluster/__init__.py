"""Starts the role processes of a run and calls them: typed RPC, deadlines, named failures. No torch."""

from offbeat_cluster._batch import call_all
from offbeat_cluster._cpus import available_cpus, split_threads
from offbeat_cluster._local import LocalLauncher
from offbeat_cluster._machine import check_processes
from offbeat_cluster._specs import ActorHandle, ClusterConfig, Launcher, RoleSpec

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
