"""Where every rank of a run goes: a pure function from nodes and groups to a plan, and the check of what was placed."""

from offbeat_cluster.placement._blocks import Block, plan_blocks
from offbeat_cluster.placement._changes import Change, Suggestion, apply_changes, suggest_changes
from offbeat_cluster.placement._check import check_plan, verify_placed
from offbeat_cluster.placement._groups import Allocation, RankGroup
from offbeat_cluster.placement._memory import MemoryEstimate, RolloutMemory, TrainMemory
from offbeat_cluster.placement._model_shape import ModelShape
from offbeat_cluster.placement._nodes import ACCELERATOR, Node, grid_nodes, local_node, read_nodes
from offbeat_cluster.placement._picture import draw_plan
from offbeat_cluster.placement._placement import plan_placement
from offbeat_cluster.placement._plan import PlacedDriver, PlacedRank, Plan

__all__ = [
    "ACCELERATOR",
    "Allocation",
    "Block",
    "Change",
    "MemoryEstimate",
    "ModelShape",
    "Node",
    "PlacedDriver",
    "PlacedRank",
    "Plan",
    "RankGroup",
    "RolloutMemory",
    "Suggestion",
    "TrainMemory",
    "apply_changes",
    "check_plan",
    "draw_plan",
    "grid_nodes",
    "local_node",
    "plan_blocks",
    "plan_placement",
    "read_nodes",
    "suggest_changes",
    "verify_placed",
]
