"""Specs of roles to start, and the section of a configuration that says where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offbeat_core import RoleName, setting
from offbeat_liveness import Policy


@dataclass(frozen=True)
class RoleSpec:
    """One role process.

    Args:
        role: its kind and number; they appear in errors, in logs and in `ps`.
        target: class of the role, as "package.module:Class".
        kwargs: constructor arguments: plain data, dataclasses and numpy arrays, decoded by its annotations.
        env: environment variables added to those of the driver, or of the node where the role runs.
        dropped_settings: variable -> names of settings that the role must not inherit in it, where the variable is a
            list of `name:value` between commas, such as PYTORCH_ALLOC_CONF. Its other settings stay.
        num_threads: CPU threads of numpy, torch and OpenMP in the process; 0 leaves them as they are.
        shares_cpus: others compute on the same CPUs at the same time, so OpenMP's threads sleep where they wait; alone
            they spin, which is faster.
        log_path: file that takes stdout and stderr, appended to; None: those of the parent.
        max_log_bytes: of that file, for a role that runs code which may print without end: it gets so much of the
            beginning, and the last. Without `log_path` nothing is kept. 0: no bound. On this machine only.
        liveness_policy: of its monitor, where the driver is watched: "report" names the processes that wait;
            "abort" also ends the process, with exit code 4, when it is in a wait that will never end.
        main_thread: the constructor and the methods that are not `async` run in the main thread of the process, where
            code may use signals and event loops of its own; the others run in another thread then.
    """

    role: RoleName
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    dropped_settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    num_threads: int = 0
    shares_cpus: bool = False
    log_path: Path | None = None
    max_log_bytes: int = 0
    liveness_policy: Policy = "report"
    main_thread: bool = False

    @property
    def name(self) -> str:
        """Name of the role, such as "rollout-0"."""
        return str(self.role)


@dataclass(frozen=True)
class Wait:
    """A call that has not been answered: an edge from the driver in the graph of processes that wait for each other.

    Args:
        on: role that has to answer, such as "rollout-1".
        method: method that was called, such as "sleep".
        lasted_s: seconds since the call.
        deadline_s: seconds it may take.
    """

    on: str
    method: str
    lasted_s: float
    deadline_s: float

    @property
    def name(self) -> str:
        """Name for an error, such as "rollout-1.sleep"."""
        return f"{self.on}.{self.method}"


RoleState = Literal["placed", "starting", "ready", "ended"]
"""A role has a place and no process yet; its constructor or `start()` runs; it answers calls; it is gone."""


@dataclass(frozen=True, kw_only=True)
class RolePlace:
    """The place of a role, and the state of its process.

    Args:
        role: its kind and number.
        node: where its process runs, by the name that plans use.
        devices: held for it, by node, such as {"gpu-3": ("GPU 0", "GPU 1")}; empty where it computes on CPUs, or on
            devices that its configuration names by number.
        pid: its process id on that node; 0 before it has one.
        state: of its process.
        since_s: Unix time when that state began.
        reason: how the process ended; "" unless it did.
    """

    role: RoleName
    node: str
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pid: int = 0
    state: RoleState = "placed"
    since_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`: where the actors of a run live, and how long to wait for them."""

    launcher: str = setting(
        "local",
        "What starts the role processes: local, on this machine without Ray; ray; or torchrun, on the nodes where "
        "torchrun (or srun, mpirun) has started this command, without Ray.",
    )
    address: str = setting(
        "local", "Ray cluster to use, as host:port; local starts one on this machine's loopback, for this run alone."
    )
    forward_env: list[str] = setting([], "Environment variables of the driver that roles on other machines get too.")
    num_nodes: int = setting(0, "Nodes that the run takes; 0: whatever the cluster has.", "nodes", ge=0)
    accelerators_per_node: int = setting(
        0, "Accelerators that it takes of each of these nodes; 0: whatever they have.", "devices", ge=0
    )
    start_timeout_s: float = setting(
        300.0,
        "Longest wait for a role to import, load a model and be ready; and for all processes of torchrun to meet.",
        "s",
        gt=0,
    )
    call_timeout_s: float = setting(1800.0, "Longest wait for one call to a role, unless the call says so.", "s", gt=0)
    connect_timeout_s: float = setting(60.0, "Longest wait for a Ray cluster to answer or to start.", "s", gt=0)
    place_timeout_s: float = setting(120.0, "Longest wait for a Ray cluster to have room for all roles.", "s", gt=0)
    stop_timeout_s: float = setting(20.0, "Time a role has to close before it is killed.", "s", gt=0)
    silent_after_s: float = setting(60.0, "A role that answers nothing for so long is killed.", "s", gt=0)
    trainer_threads: int = setting(0, "CPU threads of each trainer rank; 0: all CPUs, shared by the ranks.", ge=0)
    max_restarts: int = setting(
        5, "Times one role is started again within restart_window_s; the next death ends the run.", "restarts", ge=0
    )
    restart_window_s: float = setting(3600.0, "Restarts longer ago than this are forgotten.", "s", gt=0)
