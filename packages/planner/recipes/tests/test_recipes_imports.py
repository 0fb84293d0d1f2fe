"""Options that TRL's trainers share, in our words: defaults are theirs, and steps and shares are whole updates."""

import pytest

from offbeat_recipes import (
    OptionTable,
    OptionVerdict,
    RecipeBuilder,
    write_betas,
    write_processes,
    write_rhythm,
    write_trackers,
    write_training_arguments,
)
from offbeat_recipes._imports.option_table import OptionRow

# transformers 5.19, training_args.py, and TRL f2cd5771, trl/trainer/base_config.py, which sets bf16 and checkpointing.
DEFAULTS = {
    "engine.dtype": "bfloat16",
    "rollout.dtype": "bfloat16",
    "engine.learning_rate": 2e-6,
    "engine.schedule": "linear",
    "engine.weight_decay": 0.0,
    "engine.adam_beta1": 0.9,
    "engine.adam_beta2": 0.999,
    "engine.max_grad_norm": 1.0,
    "engine.activation_checkpointing": True,
    "engine.seed": 42,
    "rollout.seed": 42,
    "data.seed": 42,
}


def translated(**options):
    draft = RecipeBuilder(options)
    write_training_arguments(draft, learning_rate=2e-6, roles=("engine", "rollout"))
    return draft


def settings(draft):
    return {key: entry.value for key, entry in draft.entries.items()}


def test_what_is_not_set_is_what_the_other_trainer_does_then():
    assert settings(translated()) == DEFAULTS


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (
            {"adam_beta1": 0.8, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0.5},
            {
                "engine.adam_beta1": 0.8,
                "engine.adam_beta2": 0.95,
                "engine.weight_decay": 0.1,
                "engine.max_grad_norm": 0.5,
            },
        ),
        ({"bf16": False}, {"engine.dtype": "float32", "rollout.dtype": "float32"}),
        ({"fp16": True}, {"engine.dtype": "float32", "rollout.dtype": "float32"}),
        ({"use_peft": True}, {"engine.lora_rank": 16, "engine.lora_alpha": 32.0}),
        ({"lora_r": 8, "lora_alpha": 4}, {"engine.lora_rank": 8, "engine.lora_alpha": 4.0}),
        ({"use_peft": False, "lora_r": 8}, {}),
        ({"lr_scheduler_type": "polynomial"}, {"engine.schedule": "constant"}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 5e-7}},
            {"engine.schedule": "cosine", "engine.min_learning_rate_ratio": 0.25},
        ),
        ({"lr_scheduler_kwargs": '{"min_lr_rate": 0.2}'}, {"engine.min_learning_rate_ratio": 0.2}),
        ({"warmup_steps": 3}, {"engine.warmup_steps": 3}),
        ({"warmup_ratio": 0.1, "max_steps": 15}, {"engine.warmup_steps": 2}),
        ({"warmup_steps": 0.1, "max_steps": 21}, {"engine.warmup_steps": 3}),
    ],
)
def test_what_is_set_comes_along(options, changes):
    assert settings(translated(**options)) == {**DEFAULTS, **changes}


def test_a_share_of_steps_whose_number_is_not_known_is_told():
    draft = translated(warmup_ratio=0.1)
    assert settings(draft) == DEFAULTS
    assert "engine.warmup_steps" in draft.lost["warmup_ratio"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"data.epochs": 3, "checkpoint.every": 125}),
        ({"num_train_epochs": 1.5, "save_strategy": "no"}, {"data.epochs": 2, "checkpoint.every": 0}),
        (
            {"max_steps": 10, "save_steps": 0.25, "save_total_limit": 2},
            {"engine.max_updates": 3, "data.epochs": 0, "checkpoint.every": 1, "checkpoint.keep": 2},
        ),
        (
            {"eval_strategy": "steps", "eval_steps": 9, "save_steps": 5},
            {"data.epochs": 3, "eval.every_updates": 3, "data.eval_size": 64, "checkpoint.every": 2},
        ),
        ({"eval_strategy": "steps"}, {"data.epochs": 3, "eval.every_updates": 3, "data.eval_size": 64}),
        ({"report_to": "[wandb,comet_ml]"}, {"data.epochs": 3, "log.trackers": ["wandb"]}),
    ],
)
def test_steps_of_the_optimizer_become_updates_and_never_fewer_than_were_meant(options, expected):
    draft = RecipeBuilder(options)
    write_rhythm(draft, steps_per_update=4)
    assert settings(draft) == {"checkpoint.every": 125, **expected}, "500 steps where nothing is said"


def test_a_batch_is_what_all_processes_take_for_a_step():
    draft = RecipeBuilder({"num_processes": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 5})
    assert write_processes(draft) == (2, 30, 5)
    assert settings(draft) == {"engine.num_ranks": 2}
    unsaid = RecipeBuilder({})
    assert write_processes(unsaid) == (1, 8, 1)
    assert "num_processes" in unsaid.changed


@pytest.mark.parametrize("given", [[0.8, 0.9], "[0.8, 0.9]"])
def test_the_two_decays_of_adam_come_as_a_list_or_as_its_text(given):
    draft = RecipeBuilder({"betas": given})
    write_betas(draft, "betas", (0.9, 0.999))
    assert settings(draft) == {"engine.adam_beta1": 0.8, "engine.adam_beta2": 0.9}
    assert not draft.changed
    assert not draft.lost


@pytest.mark.parametrize("given", ["$BETAS", [0.8], [0.8, "x"]])
def test_decays_that_cannot_be_read_are_told_and_left_as_they_are_elsewhere(given):
    draft = RecipeBuilder({"betas": given})
    write_betas(draft, "betas", (0.9, 0.999))
    assert settings(draft) == {"engine.adam_beta1": 0.9, "engine.adam_beta2": 0.999}
    assert "using 0.9 and 0.999" in draft.lost["betas"]


def test_trackers_that_are_there_come_along():
    for given in (["wandb", "tensorboard"], "wandb", "[tensorboard,wandb]"):
        draft = RecipeBuilder({"report_to": given})
        write_trackers(draft, "report_to")
        assert settings(draft) == {"log.trackers": ["wandb"]}
    none = RecipeBuilder({"report_to": "none"})
    write_trackers(none, "report_to")
    assert not none.entries


def test_the_longest_pattern_decides_and_an_unknown_option_may_change_the_result() -> None:
    rows = {
        "a.*": OptionRow(OptionVerdict.HARMLESS, "of a"),
        "a.b.*": OptionRow(OptionVerdict.CHANGES, "of b", (False,)),
        "a.c": OptionRow(OptionVerdict.ALWAYS, "so", (True,)),
    }
    table = OptionTable(rows, {"old": "a.b"})
    assert table.judge("a.x", 1) == (OptionVerdict.HARMLESS, "of a")
    assert table.judge("a.b.x", 1) == (OptionVerdict.CHANGES, "of b")
    assert table.judge("a.b.x", False)[0] is OptionVerdict.ALWAYS
    assert [table.judge("a.c", value)[0] for value in (True, False, 1)] == [
        OptionVerdict.ALWAYS,
        OptionVerdict.CHANGES,
        OptionVerdict.CHANGES,
    ]
    assert table.judge("z", 1)[0] is OptionVerdict.CHANGES
    assert table.renamed({"old.x": 5}) == ({"a.b.x": 5}, {"a.b.x": "old.x"})


def test_an_option_that_was_read_and_changes_nothing_is_listed():
    rows = {name: OptionRow(OptionVerdict.OURS, "engine.seed") for name in ("a", "b")}
    rows["c"] = OptionRow(OptionVerdict.OURS, "engine.seed", unused="belongs to a")
    draft = RecipeBuilder({"a": 1, "b": 2, "c": 3, "d": None}, {"a": "the_old_a"})
    draft.copy("engine.seed", "a")
    for name in ("b", "c", "d"):
        draft.take(name)
    draft.finish(OptionTable(rows))
    assert settings(draft) == {"engine.seed": 1}
    assert draft.unused == {"b": "changes nothing here, given the other options", "c": "belongs to a"}


def test_a_list_of_names_is_the_same_in_any_order():
    table = OptionTable({"modules": OptionRow(OptionVerdict.CHANGES, "all", same=[["q", "v"]])})
    assert table.judge("modules", ["v", "q"])[0] is OptionVerdict.ALWAYS
    assert table.judge("modules", ["q"])[0] is OptionVerdict.CHANGES
