"""The configuration in the planner's words, and the nodes it is asked about."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from grpo_async_app._config.sections import GrpoConfig
from offbeat_placement import (
    ACCELERATOR,
    Allocation,
    ClusterView,
    Node,
    Placement,
    RankGroup,
    ResourceRequest,
    suggest_changes,
)
from offbeat_types import ConfigError, PlacementError, load_backend

LIVE: Final = "live"
"""Instead of a file of nodes: ask the running cluster."""
_BY_NUMBER: Final = "roles that name one device by its number, such as KIND:0, share it"

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


def find_view(config: GrpoConfig, cluster: str = "") -> ClusterView:
    """The nodes to plan for: "4x8", a file of nodes, "live" for the Ray cluster at `cluster.address`; "" for where the
    launcher would start.
    """
    if cluster and cluster != LIVE:
        return ClusterView.named(cluster, (config.engine.device, config.rollout.device))
    launcher = load_backend("offbeat.launcher", "ray" if cluster else config.cluster.launcher)
    nodes = launcher.nodes(config.cluster)
    if not launcher.reserves:
        nodes = [with_own_devices(node, config) for node in nodes]
    return ClusterView(nodes=tuple(nodes), reserves=launcher.reserves)


def place_run(config: GrpoConfig, view: ClusterView) -> Placement:
    """Plan where every rank goes, or say what would make it fit. Pure."""
    wanted = request_resources(config, view)
    try:
        return wanted.place(view)
    except PlacementError as error:
        if view.reserves or wanted.allocation is not None:
            raise
        suggestions = suggest_changes(view.nodes, wanted.groups)
        here = [changes for changes in suggestions if all(change.field != "nodes" for change in changes)]
        texts = [", ".join(change.text for change in changes) for changes in here]
        raise PlacementError(error.reason, error.shortfall, (*texts, _BY_NUMBER)) from None


def request_resources(config: GrpoConfig, view: ClusterView) -> ResourceRequest:
    _check_numbers(config, view)
    return ResourceRequest(groups=tuple(_groups(config, view)), allocation=_allocation(config, view))


def _check_numbers(config: GrpoConfig, view: ClusterView) -> None:
    for key, name in config.devices.items():
        kind, has_number, _ = name.partition(":")
        if view.reserves and has_number:
            raise ConfigError(
                f"{key} = {name} is one device of one machine, and on a cluster each role takes those that it is "
                f"given: name the kind alone ({kind})"
            )


def _allocation(config: GrpoConfig, view: ClusterView) -> Allocation | None:
    """The part of the cluster that the configuration asks for; None: all of it."""
    cluster = config.cluster
    if not cluster.num_nodes and not cluster.accelerators_per_node:
        return None
    if not (cluster.num_nodes and cluster.accelerators_per_node):
        raise ConfigError("cluster.num_nodes and cluster.accelerators_per_node go together: set both, or neither")
    if not view.reserves and cluster.num_nodes > len(view.nodes):
        raise PlacementError(
            f"{cluster.num_nodes} nodes asked for (cluster.num_nodes): launcher {cluster.launcher!r} starts "
            f"everything on {len(view.nodes)}",
            changes=('cluster.launcher = "ray" on a Ray cluster', "cluster.num_nodes = 1"),
        )
    kind = view.kind(config.engine.device) or view.kind(config.rollout.device)
    if not view.reserves and not kind:
        return None
    return Allocation(
        num_nodes=cluster.num_nodes,
        accelerators_per_node=cluster.accelerators_per_node,
        kind=kind or ACCELERATOR,  # where there are none the error says so
        keys=_ALLOCATION_KEYS,
    )


def _groups(config: GrpoConfig, view: ClusterView) -> list[RankGroup]:
    cluster, rollout, width = config.cluster, config.rollout, trainer_width(config)
    trains_on, samples_on = view.kind(config.engine.device), view.kind(rollout.device)
    is_colocated = cluster.colocate and bool(trains_on) and trains_on == samples_on
    groups = [
        RankGroup(
            role="trainer",
            num_replicas=config.engine.num_ranks // width,
            tensor_parallel=width,
            accelerator=trains_on,
            cpus_per_rank=_cpus_per_rank(view, trains_on, cluster.trainer_threads),
            keys=_TRAINER_KEYS,
            scales={"num_replicas": width},
        ),
        RankGroup(
            role="rollout",
            num_replicas=rollout.num_engines,
            tensor_parallel=rollout.tensor_parallel,
            accelerator=samples_on,
            cpus_per_rank=_cpus_per_rank(view, samples_on, cluster.rollout_threads / rollout.tensor_parallel),
            shares_devices_with="trainer" if is_colocated else "",
            spans_nodes=cluster.spans_nodes and bool(samples_on),
            process_per_replica=True,
            keys=_ROLLOUT_KEYS,
            scales={"cpus_per_rank": rollout.tensor_parallel},
        ),
    ]
    if config.teacher.is_set:
        groups.append(_teacher_group(config, view, samples_on))
    if config.environment.name:
        cpus = _cpus_per_rank(view, "", 1)
        groups.append(RankGroup(role="environment", accelerator="", cpus_per_rank=cpus, process_per_replica=True))
    return groups


def _teacher_group(config: GrpoConfig, view: ClusterView, samples_on: str) -> RankGroup:
    """Replicas of the teacher: apart, or on the accelerators of the engines that sample."""
    teacher = config.teacher
    kind = view.kind(teacher.device)
    if teacher.colocate and view.reserves and not (kind and kind == samples_on):
        raise ConfigError(
            f"teacher.colocate = true: the teacher computes on {kind or 'CPUs'} and the rollout engines on "
            f"{samples_on or 'CPUs'}, which share nothing; set it to false, or teacher.device as rollout.device"
        )
    return RankGroup(
        role="teacher",
        num_replicas=teacher.num_replicas,
        tensor_parallel=teacher.tensor_parallel,
        accelerator=kind,
        cpus_per_rank=_cpus_per_rank(view, kind, config.cluster.rollout_threads / teacher.tensor_parallel),
        shares_devices_with="rollout" if teacher.colocate and kind else "",
        process_per_replica=True,
        keys=_TEACHER_KEYS,
        scales={"cpus_per_rank": teacher.tensor_parallel},
    )


def trainer_width(config: GrpoConfig) -> int:
    """Trainer ranks that share each matrix: every engine that has such groups calls the option `tensor_parallel`."""
    width, num_ranks = config.engine.options.get("tensor_parallel", 1), config.engine.num_ranks
    if not isinstance(width, int) or width < 1 or num_ranks % width:
        raise ConfigError(
            f"engine.num_ranks = {num_ranks} must be a multiple of engine.options.tensor_parallel = {width!r}"
        )
    return width


def _cpus_per_rank(view: ClusterView, kind: str, threads: float) -> float:
    """CPUs to reserve: the threads that are set; one where a rank computes on CPUs and nothing is set."""
    if not view.reserves:
        return 0
    return threads or (0 if kind else 1)


def with_own_devices(node: Node, config: GrpoConfig) -> Node:
    """Add the accelerators of this machine that roles are set to, by kind as the device seam calls it.

    Those that a role names by their number are taken: nobody is given one of them.
    """
    wanted = {name.partition(":")[0] for name in config.devices.values()} - {"cpu"}
    if not wanted:
        return node
    here = _accelerators(wanted)
    named = set(_named(config))
    free = {kind: tuple(n for n in range(number) if (kind, n) not in named) for kind, number in here.items()}
    return replace(node, free=free, total=here)


def _accelerators(wanted: set[str]) -> dict[str, int]:
    """How many there are of each kind wanted. A kind that cannot be hidden from a process is there for all of them."""
    from offbeat_mesh import available_devices  # imports torch: only where accelerators may be wanted

    here = available_devices()
    if "auto" in wanted:
        wanted = {*wanted, next(iter(here))}
    return {
        kind: number
        for kind, number in here.items()
        if kind in wanted and load_backend("offbeat.device", kind).visible_variable
    }


def _named(config: GrpoConfig) -> Iterator[tuple[str, int]]:
    """Kind and number of each device that a role names; an engine takes as many from there on as it is wide."""
    widths = {"rollout.device": config.rollout.tensor_parallel, "teacher.device": config.teacher.tensor_parallel}
    for key, name in config.devices.items():
        kind, _, first = name.partition(":")
        if first.isdecimal():
            yield from ((kind, number) for number in range(int(first), int(first) + widths.get(key, 1)))
