"""Resources and requests: nodes with what is free on them, and groups of ranks."""

import json
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Final

from offbeat_core import ConfigError

ACCELERATOR: Final = "GPU"
"""Kind of accelerator where nothing says otherwise; Ray's name for the resource."""

_RAY_NAMES: Final = {"cuda": ACCELERATOR}
"""Kinds of device that Ray does not call by their own name in capitals."""

_MOST_NODES: Final = 100_000
_MOST_PER_NODE: Final = 1024
_GRID: Final = re.compile(r"(\d+)x(\d+)")
_CGROUP_V2: Final = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1: Final = Path("/sys/fs/cgroup/cpu")
_KEYS: Final[dict[str, type | UnionType]] = {
    "name": str,
    "count": int,
    "address": str,
    "kind": str,
    "accelerators": int,
    "free": list,
    "num_cpus": int | float,
    "memory_gib": int | float,
    "accelerator_memory_gib": int | float,
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine and what is free on it.

    Args:
        name: unique in the cluster.
        address: where its processes are reached.
        free: free accelerators: device indices by kind, such as {"GPU": (0, 1, 2, 3)}.
        total: accelerators by kind, the taken ones too; a kind that is left out has only free ones.
        num_cpus: free CPUs; infinity if unknown.
        memory_bytes: free main memory; infinity if unknown.
        accelerator_memory_bytes: of one accelerator; 0 if unknown.
    """

    name: str
    address: str = ""
    free: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    total: Mapping[str, int] = field(default_factory=dict)
    num_cpus: float = math.inf
    memory_bytes: float = math.inf
    accelerator_memory_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "free", {kind: tuple(sorted(each)) for kind, each in self.free.items() if each})
        for kind, devices in self.free.items():
            if len(set(devices)) < len(devices):
                raise ConfigError(f"node {self.name}: a device is free once: got {kind} {list(devices)}")
            if self.num_total(kind) < len(devices):
                raise ConfigError(
                    f"node {self.name}: {len(devices)} {kind} cannot be free of {self.num_total(kind)} in all"
                )

    def num_free(self, kind: str) -> int:
        """Free accelerators of a kind."""
        return len(self.free.get(kind, ()))

    def num_total(self, kind: str) -> int:
        """Accelerators of a kind, the taken ones too."""
        return self.total.get(kind, self.num_free(kind))


def node_order(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key of node names: "node-2" comes before "node-10"."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts], name


def names_text(names: Iterable[str]) -> str:
    """Names of neighbours: "node-0", "node-0, node-1", or "node-0 … node-7 (8)"."""
    listed = list(names)
    return ", ".join(listed) if len(listed) <= 2 else f"{listed[0]} … {listed[-1]} ({len(listed)})"


def sort_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Nodes in the order of their names, whatever the order they come in.

    Raises:
        ConfigError: two nodes of one name.
    """
    ordered = sorted(nodes, key=lambda node: node_order(node.name))
    for before, after in pairwise(ordered):
        if before.name == after.name:
            raise ConfigError(f"two nodes are named {before.name!r}: give each a name of its own")
    return ordered


def grid_nodes(num_nodes: int, accelerators_per_node: int, kind: str = ACCELERATOR) -> list[Node]:
    """Nodes alike, all free: node-0, node-1 and so on."""
    free = {kind: tuple(range(accelerators_per_node))} if accelerators_per_node else {}
    return [Node(name=f"node-{number}", free=free) for number in range(num_nodes)]


def local_node() -> Node:
    """Return this machine: the CPUs this process may use, and main memory. Accelerators are the device seam's."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Node(
        name=socket.gethostname() or "localhost",
        address="127.0.0.1",
        num_cpus=available_cpus(),
        memory_bytes=memory_bytes,
    )


def read_nodes(text: str, kind: str = ACCELERATOR) -> list[Node]:
    """Nodes from words: `4x8` (nodes × accelerators each), or a TOML or JSON file.

    The file holds `[[nodes]]`, each with `name`, and `accelerators` (how many) or `free` (device indices); optional are
    `count` (so many alike, numbered), `address`, `kind`, `num_cpus`, `memory_gib`, `accelerator_memory_gib`.

    Raises:
        ConfigError: no such file, or an entry that is wrong, by name.
    """
    if grid := _GRID.fullmatch(text.strip()):
        num_nodes, per_node = int(grid[1]), int(grid[2])
        if not 0 < num_nodes <= _MOST_NODES or per_node > _MOST_PER_NODE:
            raise ConfigError(
                f"--cluster {text}: needs at least one node and at most {_MOST_NODES}, of {_MOST_PER_NODE} "
                "accelerators at most"
            )
        return grid_nodes(num_nodes, per_node, kind)
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"--cluster {text}: takes NODESxACCELERATORS such as 4x8, a file of nodes, or live")
    return sort_nodes(node for entry in _entries(path) for node in _nodes_of(entry, str(path), kind))


def _entries(path: Path) -> list[Any]:
    try:
        content = path.read_text()
        held = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    entries = held.get("nodes") if isinstance(held, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: needs at least one [[nodes]] with name and accelerators")
    return entries


def _nodes_of(entry: Any, where: str, kind: str) -> list[Node]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"{where}: every node needs a name: got {entry!r}")
    name = entry["name"]
    for key, value in entry.items():
        if key not in _KEYS:
            raise ConfigError(f"{where}: node {name}: unknown key {key}; known: {', '.join(_KEYS)}")
        if isinstance(value, bool) or not isinstance(value, _KEYS[key]):
            raise ConfigError(f"{where}: node {name}: {key} cannot be {value!r}")
    free = entry.get("free", list(range(entry.get("accelerators", 0))))
    if not all(isinstance(device, int) and device >= 0 for device in free):
        raise ConfigError(f"{where}: node {name}: free lists device indices: got {free!r}")
    kind = entry.get("kind", kind)
    names = [name] if "count" not in entry else [f"{name}-{number}" for number in range(entry["count"])]
    return [
        Node(
            name=each,
            address=entry.get("address", ""),
            free={kind: tuple(free)},
            total={kind: entry.get("accelerators", len(free))},
            num_cpus=entry.get("num_cpus", math.inf),
            memory_bytes=entry.get("memory_gib", math.inf) * 2**30,
            accelerator_memory_bytes=int(entry.get("accelerator_memory_gib", 0) * 2**30),
        )
        for each in names
    ]


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """The nodes that a run is planned for.

    Args:
        nodes: and what is free on them.
        reserves: CPUs and devices are reserved for each role, and kinds of accelerator are called as the cluster calls
            them. Without that, as on one machine without Ray, roles share the CPUs, kinds are called as the device seam
            calls them, and a role that is to take one device by its number shares it with other roles that do.
    """

    nodes: tuple[Node, ...]
    reserves: bool

    @classmethod
    def named(cls, words: str, devices: Iterable[str]) -> "ClusterView":
        """Nodes from words.

        Args:
            words: "4x8", or a file of nodes.
            devices: settings of the recipe, which give the kind of accelerator where the words do not.

        Raises:
            ConfigError: the words or the file are wrong.
        """
        names = (device.partition(":")[0] for device in devices)
        named = next((name for name in names if name not in ("auto", "cpu")), "")
        return cls(nodes=tuple(read_nodes(words, _RAY_NAMES.get(named, named.upper()) or ACCELERATOR)), reserves=True)

    def kind(self, device: str) -> str:
        """Kind of accelerator that a role is to be given for its device setting; "" for none."""
        kinds = sorted({kind for node in self.nodes for kind in (*node.free, *node.total)})
        name, _, index = device.partition(":")
        if name == "auto":
            return kinds[0] if kinds else ""
        if name == "cpu" or (not self.reserves and (index or name not in kinds)):
            return ""
        return name.upper() if name.upper() in kinds or not kinds else kinds[0]

    def named_device(self, device: str) -> str:
        """Return a device that a role was named and takes outside the plan; "" where there is none."""
        return "" if self.kind(device) or device in ("auto", "cpu") else device

    def cpus_per_rank(self, kind: str, threads: float) -> float:
        """CPUs to reserve for a rank.

        Args:
            kind: of its accelerator; "" for a rank that computes on CPUs.
            threads: that are set for it; 0 for none, which makes one CPU where it computes on CPUs.
        """
        if not self.reserves:
            return 0
        return threads or (0 if kind else 1)


def available_cpus() -> int:
    """CPUs this process may use, at least 1: its affinity mask, cut by a container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(affinity, _quota_cpus())))


def _quota_cpus() -> float:
    """CPUs a cgroup allows, or infinity."""
    try:
        quota, period = _CGROUP_V2.read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text()
            period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text()
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except ValueError:  # "max"
        return math.inf


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Replicas of one role, each of pipeline_parallel stages of tensor_parallel ranks, one device a rank.

    A rollout engine is a replica. A trainer's mesh is a group too: `num_replicas` = dp × cp × pp, since its ranks are
    numbered with the tensor-parallel axis fastest, so that each block of tensor_parallel ranks is one such group.

    Args:
        role: such as "trainer"; unique among the groups.
        num_replicas: engines, or tensor-parallel groups of a mesh.
        tensor_parallel: ranks of one stage; they lie on one node.
        width_multiple: what tensor_parallel stays a multiple of, whatever is suggested.
        pipeline_parallel: stages of one replica; each lies on one node, all on the same one where that is possible.
        accelerator: kind of device a rank takes; "" for ranks that are given none.
        named_device: what those compute on, such as "cuda:0", for the picture; "" for CPUs.
        cpus_per_rank: CPUs that are a rank's own; 0: it shares what there is.
        memory_bytes_per_rank: main memory that is a rank's own; 0: not counted.
        shares_devices_with: a role whose devices this one may use too (colocated); "" for none.
        spans_nodes: a stage wider than a node may lie on several, each taken whole.
        process_per_replica: one process drives a whole replica; otherwise each rank is a process.
        keys: names of the settings behind these fields, for messages, such as {"num_replicas": "rollout.num_engines"};
            with any given, only these fields are suggested to change.
        scales: how much of its setting one of a field is, where that is not 1: with 4 ranks to a replica of a mesh,
            {"num_replicas": 4} for a setting that counts ranks.
    """

    role: str
    num_replicas: int = 1
    tensor_parallel: int = 1
    width_multiple: int = 1
    pipeline_parallel: int = 1
    accelerator: str = ACCELERATOR
    named_device: str = ""
    cpus_per_rank: float = 0
    memory_bytes_per_rank: int = 0
    shares_devices_with: str = ""
    spans_nodes: bool = False
    process_per_replica: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_replicas", "tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.key(name)} must be at least 1: got {getattr(self, name)}")
        if self.spans_nodes and not self.accelerator:
            raise ConfigError(f"{self.role}: spans_nodes needs accelerators: ranks on CPUs have no whole nodes")

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica, over all its stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.ranks_per_replica

    @property
    def width_text(self) -> str:
        """Devices of one replica as text: "4 GPU on one node", "2 stages of 4 GPU"."""
        text = f"{self.tensor_parallel} {self.accelerator or 'rank'}"
        if self.pipeline_parallel > 1:
            text = f"{self.pipeline_parallel} stages of {text}"
        if self.tensor_parallel > 1:
            text += " on whole nodes" if self.spans_nodes else " on one node"
        return text

    def key(self, name: str) -> str:
        """Return the setting behind a field, or role and field where none is given."""
        return self.keys.get(name, f"{self.role}.{name}")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The part of the cluster that a run asks for: so many nodes with so many accelerators each.

    Args:
        num_nodes: at least 1.
        accelerators_per_node: on each of them, at least 1.
        kind: of the accelerators.
        keys: names of the settings behind these fields, for messages.
    """

    num_nodes: int
    accelerators_per_node: int
    kind: str = ACCELERATOR
    keys: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_nodes", "accelerators_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.key(name)} must be at least 1: got {getattr(self, name)}")

    def key(self, name: str) -> str:
        """Return the setting behind a field."""
        return self.keys.get(name, name)


def pools_of(groups: Sequence[RankGroup]) -> dict[str, str]:
    """Return for each role the pool of devices it uses: roles that share devices have one pool, named after the first.

    Raises:
        ConfigError: a role that comes twice, or shares with one that is not there or of another kind.
    """
    by_role = {group.role: group for group in groups}
    if len(by_role) < len(groups):
        raise ConfigError(f"every group needs a role of its own: got {', '.join(group.role for group in groups)}")
    pools = {role: role for role in by_role}
    for group in groups:
        other = group.shares_devices_with
        if not other:
            continue
        if other not in by_role or other == group.role:
            raise ConfigError(f"{group.role} shares devices with {other!r}: choose one of {', '.join(by_role)}")
        if by_role[other].accelerator != group.accelerator or not group.accelerator:
            raise ConfigError(
                f"{group.role} shares devices with {other}: both must use accelerators of one kind, "
                f"got {group.accelerator or 'CPU'} and {by_role[other].accelerator or 'CPU'}"
            )
        kept, gone = sorted((pools[group.role], pools[other]), key=list(by_role).index)
        pools = {role: kept if pool == gone else pool for role, pool in pools.items()}
    return pools


def kinds_of(groups: Sequence[RankGroup]) -> list[str]:
    """Kinds of accelerators that the groups use, in order."""
    return list(dict.fromkeys(group.accelerator for group in groups if group.accelerator))
