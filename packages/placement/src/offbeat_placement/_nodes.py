"""Nodes: what is free where. Read from `4x8`, from a file, or asked of this machine."""

import json
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Final

from offbeat_placement._cpus import available_cpus
from offbeat_types import ConfigError

ACCELERATOR: Final = "GPU"
"""Kind of accelerator where nothing says otherwise; Ray's name for the resource."""

_MOST_NODES: Final = 100_000
_MOST_PER_NODE: Final = 1024
_GRID: Final = re.compile(r"(\d+)x(\d+)")
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
        num_cpus: free CPUs; infinity when nobody knows.
        memory_bytes: free main memory; infinity when nobody knows.
        accelerator_memory_bytes: of one accelerator; 0 when nobody knows.
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
    """The machine we are on: the CPUs this process may use, and main memory. Accelerators are the device seam's."""
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
