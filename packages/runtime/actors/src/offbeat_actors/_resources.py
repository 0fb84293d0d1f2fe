"""The nodes that a run is planned for, and what its section `cluster` asks of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from offbeat_actors._spec import ClusterConfig
from offbeat_core import ConfigError, PlacementError, available_devices, installed_backends, load_backend
from offbeat_placement import ACCELERATOR, Allocation, ClusterView, Node, RankGroup, ResourceRequest

_LIVE: Final = "live"
"""Instead of a file of nodes: ask the running cluster."""
_ALLOCATION_KEYS: Final = {
    "num_nodes": "cluster.num_nodes",
    "accelerators_per_node": "cluster.accelerators_per_node",
}

Devices = Mapping[str, str]
"""Device of each kind of role, by the setting that says so, such as {"engine.device": "cuda"}."""


def find_view(
    cluster: ClusterConfig,
    devices: Devices,
    words: str = "",
    *,
    widths: Mapping[str, int] = {},
) -> ClusterView:
    """Return the nodes to plan for.

    Args:
        cluster: section of the configuration.
        devices: by setting.
        words: "4x8", a file of nodes, "live" for the Ray cluster at `cluster.address`; "" for where the launcher would
            start.
        widths: by the settings of `devices`: how many devices a role takes from the one on that it names by number;
            one where nothing is said.

    Raises:
        BackendError: no such launcher, or what it needs is not installed.
        ConfigError: the words are wrong, or no cluster answers.
        DeadlineError: it did not in time.
    """
    if words and words != _LIVE:
        return ClusterView.named(words, devices.values())
    launcher = load_backend("offbeat.launcher", "ray" if words else cluster.launcher)
    nodes = launcher.nodes(cluster)
    if not launcher.reserves:
        nodes = [_with_own_devices(node, devices, widths) for node in nodes]
    return ClusterView(nodes=tuple(nodes), reserves=launcher.reserves)


def check_kinds(devices: Devices) -> None:
    """Refuse a kind of device that nothing here knows, where the devices themselves are those of other machines.

    Raises:
        ConfigError: with the setting, and the kinds that are known.
    """
    kinds = installed_backends("offbeat.device")
    for key, name in devices.items():
        if name.partition(":")[0] not in ("auto", *kinds):
            raise ConfigError(f"{key} = {name!r}: no such kind of device is known; choose auto, {', '.join(kinds)}")


def cluster_request(
    cluster: ClusterConfig, view: ClusterView, devices: Devices, groups: Iterable[RankGroup]
) -> ResourceRequest:
    """Return what a run asks for: its groups, on the part of the cluster that the configuration names.

    Args:
        cluster: section of the configuration.
        view: of `find_view`.
        devices: by setting.
        groups: of ranks.

    Raises:
        ConfigError: a device by its number where roles take those that they are given, or half of an allocation.
        PlacementError: several nodes where the launcher has one.
    """
    for key, name in devices.items():
        kind, has_number, _ = name.partition(":")
        if view.reserves and has_number:
            raise ConfigError(
                f"{key} = {name} is one device of one machine, and on a cluster each role takes those that it is "
                f"given: name the kind alone ({kind})"
            )
    return ResourceRequest(groups=tuple(groups), allocation=_allocation(cluster, view, devices))


def _allocation(cluster: ClusterConfig, view: ClusterView, devices: Devices) -> Allocation | None:
    """Return the part of the cluster that the configuration asks for; None: all of it."""
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
    kind = next(filter(None, map(view.kind, devices.values())), "")
    if not view.reserves and not kind:
        return None
    return Allocation(
        num_nodes=cluster.num_nodes,
        accelerators_per_node=cluster.accelerators_per_node,
        kind=kind or ACCELERATOR,  # where there are none the error says so
        keys=_ALLOCATION_KEYS,
    )


def _with_own_devices(node: Node, devices: Devices, widths: Mapping[str, int]) -> Node:
    """Add the accelerators of this machine that roles are set to, by kind as the device seam calls it.

    Those that a role names by their number are reserved: no other role is given one of them.
    """
    wanted = {name.partition(":")[0] for name in devices.values()} - {"cpu"}
    if not wanted:
        return node
    here = _accelerators(wanted)
    named = set(_named(devices, widths))
    free = {kind: tuple(n for n in range(number) if (kind, n) not in named) for kind, number in here.items()}
    sizes = [load_backend("offbeat.device", kind).memory_of_smallest() for kind in here]
    return replace(node, free=free, total=here, accelerator_memory_bytes=min(sizes, default=0))


def _accelerators(wanted: set[str]) -> dict[str, int]:
    """Return how many there are of each kind wanted. All are counted of a kind that cannot be hidden."""
    here = available_devices()  # imports torch: only where accelerators may be wanted
    if "auto" in wanted:
        wanted = {*wanted, next(iter(here))}
    return {
        kind: number
        for kind, number in here.items()
        if kind in wanted and load_backend("offbeat.device", kind).visible_variable
    }


def _named(devices: Devices, widths: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Kind and number of each device that a role names."""
    for key, name in devices.items():
        kind, _, first = name.partition(":")
        if first.isdecimal():
            yield from ((kind, number) for number in range(int(first), int(first) + widths.get(key, 1)))
