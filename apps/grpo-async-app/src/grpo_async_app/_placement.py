"""Where the ranks of a run go: the configuration in the planner's words, and the nodes it is asked about."""

from dataclasses import dataclass
from typing import Final

from grpo_async_app._config import GrpoConfig
from offbeat_cluster.placement import (
    ACCELERATOR,
    Allocation,
    Block,
    Node,
    Plan,
    RankGroup,
    draw_plan,
    plan_blocks,
    plan_placement,
    read_nodes,
)
from offbeat_types import ConfigError, PlacementError, load_backend

LIVE: Final = "live"
"""Instead of a file of nodes: ask the running cluster."""

_RAY_NAMES: Final = {"cuda": ACCELERATOR}
"""Kinds of device that Ray does not call by their own name in capitals."""

_ALLOCATION_KEYS: Final = {
    "num_nodes": "cluster.num_nodes",
    "accelerators_per_node": "cluster.accelerators_per_node",
}
_TRAINER_KEYS: Final = {"num_replicas": "engine.num_ranks", "cpus_per_rank": "cluster.trainer_threads"}
_ROLLOUT_KEYS: Final = {
    "num_replicas": "rollout.num_engines",
    "cpus_per_rank": "cluster.rollout_threads",
    "tensor_parallel": "rollout.tensor_parallel",
    "shares_devices_with": "cluster.colocate",
    "spans_nodes": "cluster.spans_nodes",
}
_TEACHER_KEYS: Final = {
    "num_replicas": "teacher.num_replicas",
    "cpus_per_rank": "cluster.rollout_threads",
    "tensor_parallel": "teacher.tensor_parallel",
    "shares_devices_with": "teacher.colocate",
}


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Every rank of a run in its place.

    Args:
        nodes: of the cluster.
        groups: of ranks, as the configuration asks for them.
        plan: where each rank goes.
    """

    nodes: tuple[Node, ...]
    groups: tuple[RankGroup, ...]
    plan: Plan

    @property
    def picture(self) -> str:
        """The nodes with every rank in its place, at most 100 columns wide."""
        return draw_plan(self.plan, self.nodes, self.groups)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What a launcher reserves."""
        return plan_blocks(self.plan, self.groups)

    def accelerator_bytes(self, role: str) -> int:
        """Memory of the smallest accelerator that a role uses; 0 when nobody knows."""
        names = {rank.node for rank in self.plan.ranks if rank.role == role and rank.device is not None}
        return min((node.accelerator_memory_bytes for node in self.nodes if node.name in names), default=0)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a run would take place.

    Args:
        nodes: and what is free on them.
        reserves: CPUs and devices are reserved for each role. Without that, as on one machine without Ray, roles share
            the CPUs, and devices are what the device seam finds.
    """

    nodes: tuple[Node, ...]
    reserves: bool


def find_site(config: GrpoConfig, cluster: str = "") -> Site:
    """The nodes to plan for.

    Args:
        config: of the run.
        cluster: "4x8", a file of nodes, "live" for the Ray cluster at `cluster.address`; "" for where the launcher
            would start.

    Raises:
        ConfigError: the words or the file are wrong.
        BackendError: the launcher is not installed.
        OffbeatError: a live cluster that does not answer.
    """
    if cluster and cluster != LIVE:
        return Site(nodes=tuple(read_nodes(cluster, _named_kind(config))), reserves=True)
    launcher = load_backend("offbeat.launcher", "ray" if cluster else config.cluster.launcher)
    return Site(nodes=tuple(launcher.nodes(config.cluster)), reserves=launcher.reserves)


def place_run(config: GrpoConfig, site: Site) -> Placement:
    """Plan where every rank goes. Pure.

    Args:
        config: of the run.
        site: to plan for.

    Raises:
        PlacementError: it does not fit, with the changes that would.
        ConfigError: settings that contradict each other.
    """
    groups = wanted_groups(config, site)
    plan = plan_placement(site.nodes, groups, wanted_allocation(config, site))
    return Placement(nodes=site.nodes, groups=tuple(groups), plan=plan)


def wanted_allocation(config: GrpoConfig, site: Site) -> Allocation | None:
    """The part of the cluster that the configuration asks for; None: all of it.

    Raises:
        ConfigError: only one of the two settings is there.
        PlacementError: it has more nodes than the launcher can reach.
    """
    cluster = config.cluster
    if not cluster.num_nodes and not cluster.accelerators_per_node:
        return None
    if not (cluster.num_nodes and cluster.accelerators_per_node):
        raise ConfigError("cluster.num_nodes and cluster.accelerators_per_node go together: set both, or neither")
    if not site.reserves:
        if cluster.num_nodes > len(site.nodes):
            raise PlacementError(
                f"{cluster.num_nodes} nodes asked for (cluster.num_nodes): launcher {cluster.launcher!r} starts "
                f"everything on {len(site.nodes)}",
                changes=('cluster.launcher = "ray" on a Ray cluster', "cluster.num_nodes = 1"),
            )
        return None
    kind = _kind(config.engine.device, site) or _kind(config.rollout.device, site)
    return Allocation(
        num_nodes=cluster.num_nodes,
        accelerators_per_node=cluster.accelerators_per_node,
        kind=kind or ACCELERATOR,  # where there are none the error says so
        keys=_ALLOCATION_KEYS,
    )


def wanted_groups(config: GrpoConfig, site: Site) -> list[RankGroup]:
    """Groups of ranks that a run consists of.

    Raises:
        ConfigError: the trainer's ranks are not whole tensor-parallel groups.
    """
    cluster, rollout, width = config.cluster, config.rollout, trainer_width(config)
    trains_on, samples_on = _kind(config.engine.device, site), _kind(rollout.device, site)
    is_colocated = cluster.colocate and bool(trains_on) and trains_on == samples_on
    groups = [
        RankGroup(
            role="trainer",
            num_replicas=config.engine.num_ranks // width,
            tensor_parallel=width,
            accelerator=trains_on,
            cpus_per_rank=_cpus_per_rank(site, trains_on, cluster.trainer_threads),
            keys=_TRAINER_KEYS,
            scales={"num_replicas": width},
        ),
        RankGroup(
            role="rollout",
            num_replicas=rollout.num_engines,
            tensor_parallel=rollout.tensor_parallel,
            accelerator=samples_on,
            cpus_per_rank=_cpus_per_rank(site, samples_on, cluster.rollout_threads / rollout.tensor_parallel),
            shares_devices_with="trainer" if is_colocated else "",
            spans_nodes=cluster.spans_nodes and bool(samples_on),
            process_per_replica=True,
            keys=_ROLLOUT_KEYS,
            scales={"cpus_per_rank": rollout.tensor_parallel},
        ),
    ]
    if config.teacher.is_set:
        groups.append(_teacher_group(config, site, samples_on))
    if config.environment.name:
        cpus = _cpus_per_rank(site, "", 1)
        groups.append(RankGroup(role="environment", accelerator="", cpus_per_rank=cpus, process_per_replica=True))
    return groups


def _teacher_group(config: GrpoConfig, site: Site, samples_on: str) -> RankGroup:
    """Replicas of the teacher: apart, or on the accelerators of the engines that sample.

    Raises:
        ConfigError: to be colocated where the two compute on different kinds of device.
    """
    teacher = config.teacher
    kind = _kind(teacher.device, site)
    if teacher.colocate and site.reserves and not (kind and kind == samples_on):
        raise ConfigError(
            f"teacher.colocate = true: the teacher computes on {kind or 'CPUs'} and the rollout engines on "
            f"{samples_on or 'CPUs'}, which share nothing; set it to false, or teacher.device as rollout.device"
        )
    return RankGroup(
        role="teacher",
        num_replicas=teacher.num_replicas,
        tensor_parallel=teacher.tensor_parallel,
        accelerator=kind,
        cpus_per_rank=_cpus_per_rank(site, kind, config.cluster.rollout_threads / teacher.tensor_parallel),
        shares_devices_with="rollout" if teacher.colocate and kind else "",
        process_per_replica=True,
        keys=_TEACHER_KEYS,
        scales={"cpus_per_rank": teacher.tensor_parallel},
    )


def trainer_width(config: GrpoConfig) -> int:
    """Trainer ranks that share each matrix: every engine that has such groups calls the option `tensor_parallel`.

    Raises:
        ConfigError: the ranks are not whole groups.
    """
    width, num_ranks = config.engine.options.get("tensor_parallel", 1), config.engine.num_ranks
    if not isinstance(width, int) or width < 1 or num_ranks % width:
        raise ConfigError(
            f"engine.num_ranks = {num_ranks} must be a multiple of engine.options.tensor_parallel = {width!r}"
        )
    return width


def _cpus_per_rank(site: Site, kind: str, threads: float) -> float:
    """CPUs to reserve: the threads that are set; one where a rank computes on CPUs and nothing is set."""
    if not site.reserves:
        return 0
    return threads or (0 if kind else 1)


def _named_kind(config: GrpoConfig) -> str:
    """Kind of accelerator on nodes of which nobody says it, from what the recipe computes on; by Ray's name for it."""
    names = (device.partition(":")[0] for device in (config.engine.device, config.rollout.device))
    named = next((name for name in names if name not in ("auto", "cpu")), "")
    return _RAY_NAMES.get(named, named.upper()) or ACCELERATOR


def _kind(device: str, site: Site) -> str:
    """Kind of accelerator behind a device setting: the cluster's own name for it; "" for CPUs."""
    kinds = sorted({kind for node in site.nodes for kind in (*node.free, *node.total)})
    name = device.partition(":")[0]
    if name == "cpu" or not site.reserves:
        return ""
    if name == "auto":
        return kinds[0] if kinds else ""
    return name.upper() if name.upper() in kinds or not kinds else kinds[0]
