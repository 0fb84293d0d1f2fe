"""Placement of every rank of a run, a pure function from nodes and groups to a plan; and the memory that each needs."""

from offbeat_placement._budget import FILLED_SHARE, BudgetSettings, choose_budget
from offbeat_placement._check import check_plan, verify_placed
from offbeat_placement._memory import (
    ClassifierMemory,
    MemoryEstimate,
    RolloutMemory,
    TrainMemory,
    read_shape,
    train_advice,
    train_memory,
)
from offbeat_placement._model_shape import NUMBER_BYTES, DeltaRule, LatentAttention, ModelShape
from offbeat_placement._placement import Placement, ResourceRequest, SettingValue, fit_settings, plan_placement
from offbeat_placement._plan import Block, PlacedDriver, PlacedRank, Plan, draw_plan, plan_blocks, process_of
from offbeat_placement._resources import (
    ACCELERATOR,
    Allocation,
    ClusterView,
    Node,
    RankGroup,
    available_cpus,
    grid_nodes,
    local_node,
    read_nodes,
)
from offbeat_placement._shortfall import Change, Suggestion

__all__ = [
    "ACCELERATOR",
    "FILLED_SHARE",
    "NUMBER_BYTES",
    "Allocation",
    "Block",
    "BudgetSettings",
    "Change",
    "ClassifierMemory",
    "ClusterView",
    "DeltaRule",
    "LatentAttention",
    "MemoryEstimate",
    "ModelShape",
    "Node",
    "PlacedDriver",
    "PlacedRank",
    "Placement",
    "Plan",
    "RankGroup",
    "ResourceRequest",
    "RolloutMemory",
    "SettingValue",
    "Suggestion",
    "TrainMemory",
    "available_cpus",
    "check_plan",
    "choose_budget",
    "draw_plan",
    "fit_settings",
    "grid_nodes",
    "local_node",
    "plan_blocks",
    "plan_placement",
    "process_of",
    "read_nodes",
    "read_shape",
    "train_advice",
    "train_memory",
    "verify_placed",
]
