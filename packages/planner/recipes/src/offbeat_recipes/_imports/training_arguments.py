"""Training arguments that frameworks share, in our words; above all transformers' TrainingArguments, for TRL's.

Source: huggingface/trl f2cd5771 (2026-07-24), trl/trainer, with the TrainingArguments that its configurations extend.
"""

import json
import math
from collections.abc import Sequence
from functools import reduce
from typing import Final

from offbeat_core import find_hub_name
from offbeat_recipes._imports.draft import RecipeBuilder, is_number
from offbeat_recipes._imports.option_table import OptionTable, read_option_table
from offbeat_recipes._imports.options import read_value

_SCHEDULES: Final = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
_TRACKERS: Final = ("wandb", "trackio", "mlflow")
_ALWAYS_WRITTEN: Final = ("console", "tensorboard", "none", "all", "")
"""Outputs that every run has, and names of no tracker."""
TRAINING_ARGUMENTS: Final = read_option_table("offbeat_recipes._imports", "training_arguments")
_ADAMW: Final = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_DROPOUT: Final = 0.05
"""TRL's default of lora_dropout."""


def write_sources(draft: RecipeBuilder, *datasets: str) -> None:
    """Write the model and the data: paths, or names of the Hub with a revision and with a part of the data set.

    Args:
        draft: to add to.
        datasets: options that name the data set.
    """
    _write_source(draft, "model.path", ("model_name_or_path",), "@", "model_revision", usual="main")
    draft.copy("model.trust_remote_code", "trust_remote_code")
    _write_source(draft, "data.path", datasets, ":", "dataset_config", usual="default")


def _write_source(
    draft: RecipeBuilder, key: str, names: Sequence[str], sign: str, part_name: str, *, usual: str
) -> None:
    draft.copy(key, *names)
    part = draft.take(part_name)
    if part in (None, usual) or key not in draft.entries:
        return
    path = str(draft.entries[key].value)
    if find_hub_name(path, "dataset") is None:
        draft.change(part_name, f"{path} is a path, of which no {part} is looked for: give that of the part itself")
        return
    draft.put(key, f"{path}{sign}{part}", draft.named(*names), part_name)


def write_training_arguments(draft: RecipeBuilder, *, learning_rate: float, roles: Sequence[str]) -> None:
    """Number format, learning rate, AdamW, adapters, seeds.

    Args:
        draft: to add to.
        learning_rate: the trainer's own default.
        roles: sections that have a number format and a seed.
    """
    is_half = draft.take("fp16", default=False)
    stored = str(draft.take("dtype", "torch_dtype", default="auto")).removeprefix("torch.")
    low = draft.take("bf16", default=not is_half and stored != "float32")
    for role in roles:
        draft.put(f"{role}.dtype", "bfloat16" if low else "float32", "bf16", "dtype", "torch_dtype")
        if draft.take("use_cpu", "no_cuda"):
            draft.put(f"{role}.device", "cpu", "use_cpu", "no_cuda")
    if is_half:
        draft.lose("fp16", "the trainer computes in float32 or bfloat16")
    draft.copy("engine.learning_rate", "learning_rate", default=learning_rate)
    kind = draft.text("lr_scheduler_type", default="linear")
    draft.put("engine.schedule", _SCHEDULES.get(kind, "constant"), "lr_scheduler_type")
    if kind not in _SCHEDULES:
        draft.lose("lr_scheduler_type", "constant, linear and cosine are supported: using constant instead")
    _write_least_rate(draft)
    _write_warmup(draft)
    draft.copy("engine.weight_decay", "weight_decay", default=0.0)
    draft.copy("engine.adam_beta1", "adam_beta1", default=0.9)
    draft.copy("engine.adam_beta2", "adam_beta2", default=0.999)
    draft.copy("engine.max_grad_norm", "max_grad_norm", default=1.0)
    draft.copy("engine.activation_checkpointing", "gradient_checkpointing", default=True)
    optimizer = draft.take("optim", default=_ADAMW[0])
    if optimizer not in _ADAMW:
        draft.lose("optim", f"{optimizer} is not supported: using AdamW instead")
    _write_adapters(draft)
    draft.copy([f"{section}.seed" for section in (*roles, "data")], "seed", default=42)
    draft.copy("data.seed", "data_seed")
    if (order := draft.take("train_sampling_strategy")) is not None:
        draft.put("data.shuffle", order != "sequential", "train_sampling_strategy")


def _write_adapters(draft: RecipeBuilder) -> None:
    """Source: trl, trainer/model_config.py and utils.py, get_peft_config."""
    if not draft.take("use_peft", default=draft.has("lora_r")):
        for name in [each for each in draft.left if each.startswith(("lora_", "use_rslora", "use_dora"))]:
            draft.ignore(name, "there are no adapters without use_peft")
            draft.take(name)
        return
    rank, alpha = draft.number("lora_r", default=16), float(draft.number("lora_alpha", default=32))
    draft.put("engine.lora_rank", rank, "lora_r", "use_peft")
    if draft.take("use_rslora"):
        alpha *= math.sqrt(rank)
        draft.change("use_rslora", "scaled by alpha / sqrt(r) there: engine.lora_alpha gives the same here")
    draft.put("engine.lora_alpha", alpha, "lora_alpha", "use_rslora")
    dropout = draft.number("lora_dropout", default=_DROPOUT)
    if dropout:
        draft.lose("lora_dropout", f"{dropout:g} there, and adapters have no dropout here")
    if not draft.has("lora_target_modules"):
        draft.lose(
            "lora_target_modules",
            "peft chooses the layers there, often only a few; here every linear layer gets an adapter",
        )


def write_betas(draft: RecipeBuilder, name: str, default: tuple[float, float]) -> None:
    """AdamW's two decays, of a list of both or of a text that a shell's quotes have made of one."""
    given = draft.take(name)
    found = read_value(given) if isinstance(given, str) else given
    betas = found if isinstance(found, list) and len(found) == 2 and all(map(is_number, found)) else default
    if given is not None and betas is default:
        draft.lose(name, f"{given} is not a pair of numbers: using {default[0]} and {default[1]}")
    draft.put("engine.adam_beta1", betas[0], name)
    draft.put("engine.adam_beta2", betas[1], name)


def write_trackers(draft: RecipeBuilder, name: str) -> None:
    """One name, or those of a list or of a text that a shell's quotes have made of one."""
    found = draft.take(name, default=[])
    given = found if isinstance(found, list) else str(found).strip("[]").split(",")
    if trackers := [each for each in given if each in _TRACKERS]:
        draft.put("log.trackers", trackers, name)
    if others := [str(each) for each in given if each not in (*_TRACKERS, *_ALWAYS_WRITTEN)]:
        draft.change(name, f"{', '.join(others)}: no such tracker; log.trackers knows {', '.join(_TRACKERS)}")


def write_processes(draft: RecipeBuilder) -> tuple[int, int, int]:
    """Ranks of a run of TRL, the samples that all of them take for a step of the optimizer, micro-batches of a step."""
    ranks = draft.count("num_processes", default=1)
    if not draft.has("num_processes"):
        draft.change(
            "num_processes", "set by accelerate, not in this file: using 1; engine.num_ranks multiplies batches"
        )
    accumulated = draft.count("gradient_accumulation_steps", default=1)
    draft.put("engine.num_ranks", ranks, "num_processes")
    each = draft.count("per_device_train_batch_size", "per_gpu_train_batch_size", default=8)
    return ranks, each * ranks * accumulated, accumulated


def finish_training_arguments(draft: RecipeBuilder, package: str, *names: str) -> None:
    """Sort what is left by the tables of a trainer, and then by that of TrainingArguments.

    Args:
        draft: to finish.
        package: of the trainer's tables.
        names: of the tables; the first that has an option decides.
    """
    tables = [*(read_option_table(package, name) for name in names), TRAINING_ARGUMENTS]
    draft.finish(reduce(OptionTable.beside, tables))


def _write_least_rate(draft: RecipeBuilder) -> None:
    """Write the end of cosine_with_min_lr: a share of the peak, or the rate itself."""
    options = draft.take("lr_scheduler_kwargs")
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError:
            options = None
    if not isinstance(options, dict):
        if draft.has("lr_scheduler_kwargs"):
            draft.lose("lr_scheduler_kwargs", "not understood: engine.min_learning_rate_ratio is all there is here")
        return
    peak = draft.entries["engine.learning_rate"].value
    share = options.get("min_lr_rate", float(options.get("min_lr", 0.0)) / peak if peak else None)
    if share:
        draft.put("engine.min_learning_rate_ratio", min(float(share), 1.0), "lr_scheduler_kwargs")
    if others := ", ".join(sorted(set(options) - {"min_lr", "min_lr_rate"})):
        draft.lose("lr_scheduler_kwargs", f"{others}: not here")


def _write_warmup(draft: RecipeBuilder) -> None:
    warmup, ratio = draft.number("warmup_steps", default=0), draft.number("warmup_ratio", default=0)
    if warmup >= 1:
        draft.put("engine.warmup_steps", int(warmup), "warmup_steps")
        return
    name, share = ("warmup_steps", warmup) if warmup else ("warmup_ratio", ratio)
    steps = draft.number("max_steps", default=-1)
    if share and steps > 0:
        draft.put("engine.warmup_steps", math.ceil(share * steps), name, "max_steps")
    elif share:
        draft.lose(name, "a share of all steps: give engine.warmup_steps as their number")


def write_rhythm(draft: RecipeBuilder, *, steps_per_update: int = 1) -> None:
    """Write how long it trains, when it validates and saves, and its trackers.

    Args:
        draft: to add to.
        steps_per_update: steps of the optimizer in one of our updates.
    """
    steps, per_update = draft.number("max_steps", default=-1), steps_per_update
    draft.copy("data.epochs", "num_train_epochs", default=3, convert=math.ceil)
    if steps > 0:
        draft.put("engine.max_updates", math.ceil(steps / per_update), "max_steps")
        draft.put("data.epochs", 0, "max_steps")
    strategy = draft.take("eval_strategy", "evaluation_strategy", default="no")
    every = _steps(draft, "eval_steps", draft.number("logging_steps", default=10), steps)
    if strategy == "steps" and every:
        draft.put("eval.every_updates", math.ceil(every / per_update), "eval_steps")
        draft.put("data.eval_size", 64, "eval_strategy")
        draft.change("eval_strategy", "the held-out rows are given in code there; here 64 are held out: data.eval_path")
    elif strategy not in ("no", False):
        name = draft.named("eval_strategy", "evaluation_strategy")
        draft.change(name, "there is no validation by epoch: set eval.every_updates and data.eval_path")
    saves = draft.take("save_strategy", default="steps")
    every = _steps(draft, "save_steps", 500, steps)
    if saves in ("no", False):
        draft.put("checkpoint.every", 0, "save_strategy")
    elif saves == "steps" and (every or draft.given("save_steps") == 0):
        draft.put("checkpoint.every", math.ceil(every / per_update), "save_steps")
    elif saves != "steps":
        draft.change("save_strategy", "checkpoints come after so many updates: checkpoint.every")
    draft.copy("checkpoint.keep", "save_total_limit")
    draft.copy("checkpoint.save_optimizer", "save_only_model", convert=lambda alone: not alone)
    write_trackers(draft, "report_to")
    draft.copy("log.project", "wandb_project", "trackio_project", "project")


def _steps(draft: RecipeBuilder, name: str, default: float, all_steps: float) -> float:
    """Steps between two events; transformers takes less than 1 for a share of all steps, 0 where those are open."""
    every = float(draft.number(name, default=default))
    if not 0 < every < 1:
        return every
    if all_steps <= 0:
        draft.change(name, "a share of all steps, whose number is not known here: give it in updates")
        return 0.0
    return float(math.ceil(every * all_steps))
