"""Options of TRL's trainers: supervised, and those that learn from preferences.

Source: huggingface/trl f2cd5771 (2026-07-24), trl/trainer/sft_config.py, and of release 1.16 dpo_config.py,
kto_config.py, reward_config.py, experimental/orpo/orpo_config.py and experimental/cpo/cpo_config.py, with transformers'
TrainingArguments; names of its scripts (`model_name_or_path`, `dataset_name`) from trl/scripts/utils.py.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat_core import ConfigError
from offbeat_recipes import (
    RecipeBuilder,
    Source,
    finish_training_arguments,
    write_processes,
    write_rhythm,
    write_sources,
    write_training_arguments,
)

_OF_PREFERENCES: Final = (
    *("beta", "desirable_weight", "rpo_alpha", "precompute_ref_log_probs", "reference_free", "simpo_gamma"),
    "center_rewards_coefficient",
)

_NO_LIMIT: Final = 10**6


def check_supervised(source: Source, file: Path) -> None:
    """Refuse options of a trainer that learns from preferences: a file of options does not name its trainer.

    Raises:
        ConfigError: with the words that import it.
    """
    if found := [name for name in source.options if name in _OF_PREFERENCES]:
        known = ", ".join(f"trl-{trainer}" for trainer in PREFERENCE_TRAINERS)
        raise ConfigError(f"{file} learns from preferences ({found[0]}): name its trainer instead of trl: {known}")


def import_supervised(source: Source) -> RecipeBuilder:
    """Translate fields of SFTConfig, and of the script that makes one."""
    draft = RecipeBuilder(source.options)
    _write_data(draft, source.options)
    draft.copy("data.text_column", "dataset_text_field", default="text")
    draft.copy("data.shuffle", "shuffle_dataset", default=True)
    if not draft.take("assistant_only_loss", default=False):
        draft.change("assistant_only_loss", "of a conversation the loss is on the assistant's turns, as if it were set")
    _write_training(draft, 2e-5)
    finish_training_arguments(draft, __package__, "trl")
    return draft


def _write_training(draft: RecipeBuilder, learning_rate: float) -> None:
    write_training_arguments(draft, learning_rate=learning_rate, roles=("engine",))
    _, samples, _ = write_processes(draft)
    names = ("per_device_train_batch_size", "per_gpu_train_batch_size", "gradient_accumulation_steps")
    draft.put("engine.batch_size", samples, *names)
    write_rhythm(draft)


def _write_data(draft: RecipeBuilder, options: Mapping[str, Any]) -> None:
    write_sources(draft, "dataset_name")
    draft.copy("data.split", "dataset_train_split", default="train")
    _write_longest(draft, options)
    if draft.take("truncation_mode", default="keep_start") != "keep_start":
        draft.change("truncation_mode", "the end is cut off, not the beginning")


def _write_longest(draft: RecipeBuilder, options: Mapping[str, Any]) -> None:
    """Write the longest sequence; null, as TRL wants it of rows with images, is no limit there."""
    names = ("max_length", "max_seq_length")
    unbounded = [name for name in names if options.get(name, 0) is None]
    longest = draft.number(*names, default=_NO_LIMIT if unbounded else 1024)
    draft.put("data.max_sequence_tokens", longest, *names)
    draft.put("data.too_long", "filter" if longest == _NO_LIMIT else "truncate", "truncation_mode")
    if longest == _NO_LIMIT:
        draft.change(unbounded[0], f"no limit there; here so many tokens that none is reached: {_NO_LIMIT}")


def import_preferences(trainer: str, source: Source) -> RecipeBuilder:
    """Translate fields of DPOConfig, KTOConfig, ORPOConfig, CPOConfig or RewardConfig.

    Raises:
        ConfigError: a loss that is not there.
    """
    draft = RecipeBuilder(source.options)
    _write_data(draft, source.options)
    PREFERENCE_TRAINERS[trainer](draft)
    _write_training(draft, 1e-4 if trainer == "reward" else 1e-6)
    finish_training_arguments(draft, __package__, "preferences", "trl")
    return draft


def _write_dpo(draft: RecipeBuilder) -> None:
    kinds = draft.take("loss_type", default="sigmoid")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    _put_loss(draft, {"sigmoid": "dpo", "ipo": "ipo"}, kind)
    draft.copy("preference.beta", "beta", default=0.1, convert=float)
    if draft.number("label_smoothing", default=0.0):
        draft.ignore(
            "label_smoothing", "TRL's sigmoid and ipo do not read it; preference.label_smoothing does, with dpo"
        )


def _write_kto(draft: RecipeBuilder) -> None:
    _put_loss(draft, {"kto": "kto"}, draft.take("loss_type", default="kto"))
    for name, default in (("beta", 0.1), ("desirable_weight", 1.0), ("undesirable_weight", 1.0)):
        draft.copy(f"preference.{name}", name, default=default, convert=float)
    draft.change("per_device_train_batch_size", "the baseline is of all answers of a step, not of one device's")


def _write_orpo(draft: RecipeBuilder) -> None:
    draft.put("preference.loss", "orpo", "beta")
    draft.copy("preference.beta", "beta", default=0.1, convert=float)


def _write_cpo(draft: RecipeBuilder) -> None:
    _put_loss(draft, {"simpo": "simpo"}, draft.take("loss_type", default="sigmoid"))
    draft.copy("preference.beta", "beta", default=0.1, convert=float)
    draft.copy("preference.target_margin", "simpo_gamma", default=0.5, convert=float)
    draft.copy("preference.label_smoothing", "label_smoothing", default=0.0, convert=float)
    if draft.number("cpo_alpha", default=1.0):
        draft.lose("cpo_alpha", "no likelihood beside the margin: as if it were 0, which is SimPO of its paper")


def _write_reward(draft: RecipeBuilder) -> None:
    draft.put("preference.loss", "reward", "center_rewards_coefficient")
    draft.copy("preference.center_rewards", "center_rewards_coefficient", convert=float)


def _put_loss(draft: RecipeBuilder, known: Mapping[str, str], kind: object) -> None:
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(f"loss_type = {kind!r} is not supported: preference.loss has TRL's {', '.join(known)}")
    draft.put("preference.loss", known[str(kind)], "loss_type")


PREFERENCE_TRAINERS: Final[Mapping[str, Callable[[RecipeBuilder], None]]] = {
    "dpo": _write_dpo,
    "kto": _write_kto,
    "orpo": _write_orpo,
    "cpo": _write_cpo,
    "reward": _write_reward,
}
"""Writers of the section `preference`, by the trainer's name."""
