"""The preparation of a recipe: planned on a cluster, made to fit it, rehearsed on a laptop."""

from offbeat_recipes._batch.commands import batch_commands
from offbeat_recipes._drawn_data import (
    NUM_DRAWN,
    draw_chats,
    draw_figures,
    draw_pairs,
    draw_ratings,
    draw_sums,
)
from offbeat_recipes._elsewhere import layout_elsewhere, layout_row
from offbeat_recipes._imports.command import Framework, import_recipe
from offbeat_recipes._imports.draft import Entry, RecipeBuilder, is_number
from offbeat_recipes._imports.option_table import OptionTable, OptionVerdict, read_option_table
from offbeat_recipes._imports.options import Program, Source, is_open, read_command_line, read_options
from offbeat_recipes._imports.training_arguments import (
    TRAINING_ARGUMENTS,
    finish_training_arguments,
    write_betas,
    write_processes,
    write_rhythm,
    write_sources,
    write_trackers,
    write_training_arguments,
)
from offbeat_recipes._plan_command import (
    PLAN_OPTIONS,
    PLAN_SWITCHES,
    Planner,
    RunMemory,
    RunPlan,
    plan_command,
    plan_unseen,
    sample_row,
)
from offbeat_recipes._recipe_text import change_recipe
from offbeat_recipes._shrink import (
    EMBEDDED,
    MAX_ROLES,
    REHEARSAL_BYTES,
    installed_backend,
    shrink_engine,
    stand_ins,
    takes_experts,
    takes_images,
)
from offbeat_recipes._tiny_model import MAX_IMAGE_TOKENS, SEEING, make_tiny_model, tiny_family, write_tiny_model

__all__ = [
    "EMBEDDED",
    "MAX_IMAGE_TOKENS",
    "MAX_ROLES",
    "NUM_DRAWN",
    "PLAN_OPTIONS",
    "PLAN_SWITCHES",
    "REHEARSAL_BYTES",
    "SEEING",
    "TRAINING_ARGUMENTS",
    "Entry",
    "Framework",
    "OptionTable",
    "OptionVerdict",
    "Planner",
    "Program",
    "RecipeBuilder",
    "RunMemory",
    "RunPlan",
    "Source",
    "batch_commands",
    "change_recipe",
    "draw_chats",
    "draw_figures",
    "draw_pairs",
    "draw_ratings",
    "draw_sums",
    "finish_training_arguments",
    "import_recipe",
    "installed_backend",
    "is_number",
    "is_open",
    "layout_elsewhere",
    "layout_row",
    "make_tiny_model",
    "plan_command",
    "plan_unseen",
    "read_command_line",
    "read_option_table",
    "read_options",
    "sample_row",
    "shrink_engine",
    "stand_ins",
    "takes_experts",
    "takes_images",
    "tiny_family",
    "write_betas",
    "write_processes",
    "write_rhythm",
    "write_sources",
    "write_tiny_model",
    "write_trackers",
    "write_training_arguments",
]
