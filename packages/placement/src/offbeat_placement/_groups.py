"""What is wanted: groups of ranks, and how much of the cluster a run may take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offbeat_placement._nodes import ACCELERATOR
from offbeat_types import ConfigError


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
        accelerator: kind of device a rank takes; "" for ranks that compute on CPUs.
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

    def key(self, name: str) -> str:
        """The setting behind a field, or role and field where none is given."""
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
        """The setting behind a field."""
        return self.keys.get(name, name)


def pools_of(groups: Sequence[RankGroup]) -> dict[str, str]:
    """For each role the pool of devices it uses: roles that share devices have one pool, named after the first.

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
