"""Where every rank of a run goes: a pure function from nodes and groups to a plan, and the check of what was placed."""

from offbeat_placement._blocks import Block, plan_blocks, process_of
from offbeat_placement._changes import Change, Suggestion, apply_changes, suggest_changes
from offbeat_placement._check import check_plan, verify_placed
from offbeat_placement._cpus import available_cpus
from offbeat_placement._groups import Allocation, RankGroup
from offbeat_placement._memory import MemoryEstimate, RolloutMemory, TrainMemory
from offbeat_placement._model_shape import ModelShape
from offbeat_placement._nodes import ACCELERATOR, Node, grid_nodes, local_node, read_nodes
from offbeat_placement._picture import draw_plan
from offbeat_placement._placement import plan_placement
from offbeat_placement._plan import PlacedDriver, PlacedRank, Plan

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
    "available_cpus",
    "check_plan",
    "draw_plan",
    "grid_nodes",
    "local_node",
    "plan_blocks",
    "plan_placement",
    "process_of",
    "read_nodes",
    "suggest_changes",
    "verify_placed",
]
