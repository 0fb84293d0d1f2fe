"""The `torchrun` launcher: roles on this machine as the local launcher starts them, and on others by their agents."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from offbeat_actors._actor import ActorHandle
from offbeat_actors._launcher import own_environment
from offbeat_actors._local import LocalLauncher, show_devices
from offbeat_actors._remote import start_remote
from offbeat_actors._spec import ClusterConfig, RolePlace, RoleSpec
from offbeat_actors._wire import Channel
from offbeat_actors.torchrun._job import Job, command_words
from offbeat_actors.torchrun._member import describe_member, serve_member
from offbeat_actors.torchrun._members import Members
from offbeat_core import BackendError, ConfigError, OffbeatError, PlacementError, RoleName
from offbeat_placement import Node, Plan, RankGroup, process_of

_INTERRUPTED: Final = 130
_BUG: Final = 1
_members: Members | None = None
"""Members of this process's job, whose driver it is. They outlive a launcher, as an agent serves several."""


@dataclass
class _Place:
    """The place of a role: its node, and the devices there that it is shown; none: all of them."""

    node: str
    kind: str = ""
    devices: list[int] = field(default_factory=list)


class TorchrunLauncher(LocalLauncher):
    """Starts roles on the nodes of a job of torchrun, or of a launcher that sets the same variables. No Ray.

    Rank 0 is the driver. Of every other node the process with LOCAL_RANK 0 is the agent, which starts roles as its
    children; the other processes wait for the end. `drive` brings them together, before a launcher is made.
    """

    reserves = True

    def __init__(self, run_name: str, config: ClusterConfig | None = None) -> None:
        super().__init__(run_name, config)
        self._placed: dict[RoleName, _Place] = {}

    @staticmethod
    def check_installed() -> None:
        """See whether torch, whose store the processes meet at, is here.

        Raises:
            BackendError: it is not.
        """
        if find_spec("torch") is None:
            raise BackendError('cluster.launcher = "torchrun" needs torch, which is not installed: pip install torch')

    @classmethod
    def drive(cls, config: Any, work: Callable[[], int]) -> int:
        """Work as the driver, or serve it as another process of the job: see `run_on_driver`."""
        global _members
        job = Job.take(command_words(type(config).__module__.partition(".")[0]))
        if job.rank:
            return serve_member(job, config.cluster, config)
        _members = Members(job, describe_member(job, config), config.cluster)
        code = _BUG
        try:
            code = work()
        except OffbeatError as error:
            code = error.exit_code
            raise
        except KeyboardInterrupt:
            code = _INTERRUPTED
            raise
        finally:
            _members.end(code)
            _members = None
        return code

    @classmethod
    def nodes(cls, config: ClusterConfig) -> list[Node]:
        """Return the nodes of the job.

        Raises:
            ConfigError: this process is not the driver of one.
        """
        return _job_members().nodes()

    @property
    def address(self) -> str:
        """IP address of this machine, as the other nodes see it."""
        return _job_members().address

    async def place(self, plan: Plan, groups: Sequence[RankGroup], *, deadline_s: float | None = None) -> None:
        """Note the places that a plan gives to roles: the nodes belong to this job already.

        Raises:
            PlacementError: it takes a node that the job has not.
        """
        by_role = {group.role: group for group in groups}
        found: dict[RoleName, _Place] = {}
        held: dict[RoleName, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for rank in plan.ranks:
            group = by_role[rank.role]
            role = process_of(rank, group)
            place = found.setdefault(role, _Place(rank.node, group.accelerator))
            if rank.device is not None:
                held[role][rank.node].append(f"{group.accelerator} {rank.device}")
                if rank.node == place.node:
                    place.devices.append(rank.device)
        members = _job_members()
        names = [node.name for node in members.nodes()]
        if missing := sorted({place.node for place in found.values()} - {*names}):
            raise PlacementError(f"the plan uses {', '.join(missing)}, and the job has {', '.join(names)}")
        now_s = time.time()
        for role, place in found.items():
            devices = {node: tuple(each) for node, each in held[role].items()}
            self._places[role] = RolePlace(role=role, node=place.node, devices=devices, since_s=now_s)
            self._shown.pop(role, None)
            if place.devices and place.node == members.home:
                self._shown[role] = show_devices(place.kind, place.devices)
        self._placed |= found

    @property
    def _home_name(self) -> str:
        return _job_members().home

    async def _spawn(self, spec: RoleSpec) -> ActorHandle:
        place, members = self._placed.get(spec.role), _job_members()
        if place is None or place.node == members.home:
            return await super()._spawn(spec)
        link = members.links[place.node]
        if link.lost:
            raise PlacementError(
                f"{spec.name} was placed on {place.node}, which is lost ({link.lost}), and a job gets no other node",
                changes=("start the job again with the command `resume`",),
            )
        env = own_environment(spec, self._run_name, self.address)
        process = await start_remote(
            link, spec, env, self._config, devices=place.devices or None, device_kind=place.kind
        )
        return ActorHandle(spec, process, Channel(process), self._config)


def _job_members() -> Members:
    if _members is None:
        raise ConfigError(
            'cluster.launcher = "torchrun" has nodes only where torchrun has started the command train or resume; '
            "plan for other nodes with --cluster 2x8, or use --cluster.launcher local here"
        )
    return _members
