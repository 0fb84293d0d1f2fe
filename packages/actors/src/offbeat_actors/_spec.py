"""What to start, and what a launcher and a started role look like to their caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from offbeat_liveness import Policy
from offbeat_placement import Node, Plan, RankGroup
from offbeat_types import setting

T = TypeVar("T")


@dataclass(frozen=True)
class RoleSpec:
    """One role process.

    Args:
        name: role and index, such as "rollout-0"; it appears in errors, in logs and in `ps`.
        target: class of the role, as "package.module:Class".
        kwargs: constructor arguments: plain data, dataclasses and numpy arrays, decoded by its annotations.
        env: environment variables added to those of the driver, or of the node where the role runs.
        num_threads: CPU threads of numpy, torch and OpenMP in the process; 0 leaves them as they are.
        log_path: file that takes stdout and stderr, appended to; None: those of the parent.
        liveness_policy: of its monitor, where the driver is watched: "report" says who waits for whom; "abort" also
            ends the process, with exit code 4, when it stands in a wait that will never end.
    """

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = 0
    log_path: Path | None = None
    liveness_policy: Policy = "report"


@dataclass(frozen=True)
class Wait:
    """A call that has not been answered: an edge from the driver in the graph of who waits for whom.

    Args:
        name: of the wait, such as "rollout-1.sleep".
        on: the role that has to answer.
        lasted_s: seconds since the call.
        deadline_s: seconds it may take.
    """

    name: str
    on: str
    lasted_s: float
    deadline_s: float


class ActorHandle(Protocol):
    """A started role. All methods belong to the event loop that started it."""

    @property
    def name(self) -> str:
        """The role's name."""
        ...

    @property
    def address(self) -> str:
        """IP address of the machine where the role runs, as the other machines see it."""
        ...

    @property
    def alive(self) -> bool:
        """False once its process is gone."""
        ...

    @overload
    async def call(
        self, method: str, *args: Any, returns: type[T], deadline_s: float | None = None, **kwargs: Any
    ) -> T: ...
    @overload
    async def call(
        self, method: str, *args: Any, returns: None = None, deadline_s: float | None = None, **kwargs: Any
    ) -> None: ...
    async def call(
        self, method: str, *args: Any, returns: Any = None, deadline_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a public method of the role; any number of calls may be in flight.

        Methods that are not `async` run one at a time, in the order they were called; `async` ones run at once,
        also while another method is busy. Cancelling the call cancels an `async` method and takes a waiting sync one
        off the queue; a sync method that has begun runs to its end.

        Args:
            method: its name.
            args: positional arguments: plain data, dataclasses, numpy arrays, decoded by the method's annotations.
            returns: type of the result, such as `list[Completion]`; None throws the result away.
            deadline_s: seconds until DeadlineError; None: the launcher's `call_timeout_s`.
            kwargs: keyword arguments, likewise.

        Raises:
            OffbeatError: the method raised it, with the same type and text.
            PeerFailedError: the method raised another error, or the process died.
            DeadlineError: no answer in time.
        """
        ...

    async def wait_dead(self) -> str:
        """Wait until the process is gone and say how it ended."""
        ...

    async def stop(self, deadline_s: float | None = None) -> None:
        """Close the role and end its process: politely, then SIGTERM, then SIGKILL, all within the deadline.

        Raises:
            OffbeatError: the role's `close()` failed. The process is gone all the same.
        """
        ...

    def kill(self) -> None:
        """End the process now."""
        ...


class Launcher(Protocol):
    """Starts roles. Found by entry point `offbeat.launcher`; built as `Launcher(run_name, config)`.

    Args:
        reserves: devices and CPUs of a plan belong to the run alone once it is placed.
    """

    reserves: bool

    @property
    def address(self) -> str:
        """IP address of the driver's machine, as the machines of its roles see it; known once one has been started."""
        ...

    @classmethod
    def nodes(cls, config: "ClusterConfig") -> list[Node]:
        """The machines that roles can be started on, and what is free there now.

        Raises:
            ConfigError: no cluster answers at `address`.
            DeadlineError: it did not in `connect_timeout_s`.
        """
        ...

    async def place(self, plan: Plan, groups: Sequence[RankGroup], *, deadline_s: float | None = None) -> None:
        """Reserve what a plan asks for, and check that it lies as planned. `start` then puts each role in its place.

        A role with devices sees these alone, so to itself its first is number 0. A role that no plan names shares its
        machine with the driver. A role may be placed again, by another plan, once its process is gone.

        Args:
            plan: of roles named after their group: "trainer-3" is rank 3 of group "trainer"; where one process drives
                a replica, "rollout-1" is the process of replica 1.
            groups: that the plan was made for.
            deadline_s: for all of it; None: `place_timeout_s`.

        Raises:
            PlacementError: a node cannot hold its part at all, or does not lie as planned. Nothing stays reserved.
            DeadlineError: nodes are busy, or do not answer, by name. Nothing stays reserved.
        """
        ...

    async def start(self, spec: RoleSpec, *, deadline_s: float | None = None) -> ActorHandle:
        """Start a role, and return when its constructor, and its `start()` if it has one, are done.

        Raises:
            OffbeatError: the constructor raised it, with the same type and text.
            PeerFailedError: the constructor raised another error, or the process died.
            DeadlineError: not ready in time; the process has been ended.
        """
        ...

    def waits(self) -> list[Wait]:
        """Calls to all roles that have not been answered, the longest first."""
        ...

    async def close(self, deadline_s: float | None = None) -> None:
        """Stop every role that is still there, all at once: see `ActorHandle.stop`.

        Args:
            deadline_s: for all of them together; None: `stop_timeout_s`.
        """
        ...

    def kill(self) -> None:
        """End every role now. A `close` that runs, or comes after it, has nothing left to wait for."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `cluster`: where the actors of a run live, and how long to wait for them."""

    launcher: str = setting("local", "Who starts the role processes: local, on this machine without Ray; or ray.")
    address: str = setting(
        "local", "Ray cluster to use, as host:port; local starts one on this machine's loopback, for this run alone."
    )
    forward_env: list[str] = setting([], "Environment variables of the driver that roles on a Ray cluster get too.")
    num_nodes: int = setting(0, "Nodes that the run takes; 0: whatever the cluster has.", "nodes", ge=0)
    accelerators_per_node: int = setting(
        0, "Accelerators that it takes of each of these nodes; 0: whatever they have.", "devices", ge=0
    )
    start_timeout_s: float = setting(300.0, "Longest wait for a role to import, load a model and be ready.", "s", gt=0)
    call_timeout_s: float = setting(1800.0, "Longest wait for one call to a role, unless the call says so.", "s", gt=0)
    connect_timeout_s: float = setting(60.0, "Longest wait for a Ray cluster to answer or to start.", "s", gt=0)
    place_timeout_s: float = setting(120.0, "Longest wait for a Ray cluster to have room for all roles.", "s", gt=0)
    stop_timeout_s: float = setting(20.0, "Time a role has to close before it is killed.", "s", gt=0)
    silent_after_s: float = setting(60.0, "A role that answers nothing for so long is killed.", "s", gt=0)
    trainer_threads: int = setting(0, "CPU threads of each trainer; 0 takes a share of all CPUs.", ge=0)
    max_restarts: int = setting(
        5, "Times one role is started again within restart_window_s; the next death ends the run.", "restarts", ge=0
    )
    restart_window_s: float = setting(3600.0, "Restarts longer ago than this are forgotten.", "s", gt=0)
