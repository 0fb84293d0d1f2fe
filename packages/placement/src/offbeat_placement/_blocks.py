"""What a launcher reserves: devices of one node that are taken together or not at all."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offbeat_placement._groups import RankGroup
from offbeat_placement._plan import PlacedRank, Plan


@dataclass(frozen=True)
class Block:
    """A part of one node, reserved as one piece.

    Args:
        name: unique in the plan: "rollout-0"; "rollout-0@1" for the second node of one replica; "trainer@2" for the
            ranks of a mesh on its third node.
        node: name of the node of the plan. A launcher may take another, if it takes it for the whole block.
        num_devices: accelerators; 0 for processes on CPUs.
        device_kind: of the accelerators; "" for none.
        num_cpus: of all ranks in it.
        memory_bytes: of all ranks in it.
        roles: for each process in it the ordinals of its devices, 0 to num_devices - 1.
    """

    name: str
    node: str
    num_devices: int
    device_kind: str
    num_cpus: float
    memory_bytes: int
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def plan_blocks(plan: Plan, groups: Sequence[RankGroup]) -> tuple[Block, ...]:
    """The blocks of a plan, in the order of groups, then of rank.

    A replica is one block, or one on each of its nodes; the ranks of a mesh are one block a node; groups that share
    devices share blocks.

    Args:
        plan: made for these groups.
        groups: wanted.
    """
    by_role = {group.role: group for group in groups}
    blocks: list[Block] = []
    num_nodes: dict[str, int] = defaultdict(int)
    for ranks in _pieces(plan, by_role):
        first = by_role[ranks[0].role]
        if first.process_per_replica or not first.accelerator:
            name = process_of(ranks[0], first)
            is_split = len({rank.node for rank in plan.replica(first.role, ranks[0].replica)}) > 1
        else:
            name, is_split = first.role, True
        if is_split:
            num_nodes[name] += 1
            name = f"{name}@{num_nodes[name] - 1}"
        blocks.append(_block(name, ranks, by_role))
    return tuple(blocks)


def process_of(rank: PlacedRank, group: RankGroup) -> str:
    """Name of the process that a rank belongs to: "trainer-3", or of the whole replica "rollout-1"."""
    return f"{group.role}-{rank.replica if group.process_per_replica else rank.rank}"


def _pieces(plan: Plan, by_role: Mapping[str, RankGroup]) -> Iterator[list[PlacedRank]]:
    """Ranks that must be reserved together: of one replica, or of a mesh, on one node; and who shares their devices."""
    piece_of: dict[object, list[PlacedRank]] = {}
    for rank in plan.ranks:
        keys = _keys(rank, by_role[rank.role])
        piece = [rank]
        for held in {id(piece_of[key]): piece_of[key] for key in keys if key in piece_of}.values():
            piece = held + piece
        for other in piece:
            piece_of.update(dict.fromkeys(_keys(other, by_role[other.role]), piece))
    order = {id(rank): place for place, rank in enumerate(plan.ranks)}
    pieces = {id(piece): sorted(piece, key=lambda rank: order[id(rank)]) for piece in piece_of.values()}
    yield from sorted(pieces.values(), key=lambda piece: order[id(piece[0])])


def _keys(rank: PlacedRank, group: RankGroup) -> list[object]:
    """What a rank has in common with those it must be reserved with."""
    if group.process_per_replica:
        company: object = rank.replica
    else:  # a mesh on devices is one piece a node; on CPUs each stage is one
        company = None if group.accelerator else rank.rank // group.tensor_parallel
    keys: list[object] = [("company", rank.role, rank.node, company)]
    if rank.device is not None:
        keys.append(("device", rank.node, group.accelerator, rank.device))
    return keys


def _block(name: str, ranks: Sequence[PlacedRank], by_role: Mapping[str, RankGroup]) -> Block:
    kind = by_role[ranks[0].role].accelerator
    devices = sorted({rank.device for rank in ranks if rank.device is not None})
    roles: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        roles[process_of(rank, by_role[rank.role])] += [devices.index(rank.device)] if rank.device is not None else []
    return Block(
        name=name,
        node=ranks[0].node,
        num_devices=len(devices),
        device_kind=kind,
        num_cpus=sum(by_role[rank.role].cpus_per_rank for rank in ranks),
        memory_bytes=sum(by_role[rank.role].memory_bytes_per_rank for rank in ranks),
        roles={process: tuple(sorted(ordinals)) for process, ordinals in roles.items()},
    )
