"""The `ray` launcher: roles on the nodes of a Ray cluster. It imports without Ray, and names what to install."""

from offbeat_actors.ray._cluster import cluster_nodes
from offbeat_actors.ray._launcher import RayLauncher

__all__ = ["RayLauncher", "cluster_nodes"]
