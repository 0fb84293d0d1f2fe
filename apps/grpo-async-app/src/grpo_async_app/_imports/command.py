"""`grpo-async-app import verl|trl|openrlhf|prime-rl FILE`: writes our TOML, and reports what was not carried over."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.openrlhf import import_openrlhf, names_model
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from grpo_async_app._preflight.settings import check_settings
from offbeat_core import ConfigError, parse_config
from offbeat_recipes import Framework, RecipeBuilder, Source, import_recipe, read_command_line, read_options
from offbeat_run import CommandWords

_SFT_HERE: Final = "`sft-app import` takes it"
_OTHERS: Final = {
    "sft_trainer": ("SFT", _SFT_HERE),
    "main_generation": ("generation without training", "`grpo-async-app eval RUN` samples from what was trained"),
    "main_eval": ("scoring without training", "`grpo-async-app eval RUN` scores what was trained"),
    "main_spin": ("SPIN, which learns from preferences", "there is no such trainer here"),
    "main_sppo": ("SPPO, which learns from preferences", "there is no such trainer here"),
    "main_prime": ("PRIME, which trains its reward model", "there is no such trainer here"),
    "main_flowrl": ("FlowRL, which has another objective", "there is no such loss here"),
    "main_gkd": ("GKD", "write a file with a section teacher: on-policy distillation"),
    "vla.main_ppo": ("RL of a robot's policy in a simulator", "language models are trained here"),
}
"""Kinds of program by the end of their names, and what to do."""
_KNOWN_PROGRAMS: Final = (
    "main_ppo",
    "main_ppo_split",
    "main_ppo_sync",
    "main_ppo_v0",
    "main_dapo",
    "main_entropy",
    "fully_async_main",
)
_KNOWN_CONFIGS: Final = re.compile(r"(fully_async_|one_step_off_|transfer_queue_)?(ppo|dapo)(_megatron)?_trainer")

_TRL_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "RLOO": ("normalize_advantages", "reward_clip_range", "rloo_k"),
    "PPO with a critic": ("num_ppo_epochs", "vf_coef", "cliprange_value"),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "DPO": ("precompute_ref_log_probs", "loss_weights", "f_divergence_type", "rpo_alpha", "ld_alpha", "reference_free"),
    "reward modelling": ("center_rewards_coefficient",),
    "GKD": ("lmbda", "teacher_model_name_or_path"),
    "SFT": (
        "packing",
        "assistant_only_loss",
        "completion_only_loss",
        "dataset_text_field",
        "max_seq_length",
        "max_length",
        "neftune_noise_alpha",
    ),
    "a mixture of data sets": ("datasets", "dataset_mixture", "mixture"),
    "a configuration of accelerate": ("distributed_type", "mixed_precision", "main_process_port"),
}
"""Options that only configurations of this kind have; the first kind with one stands."""
_DPO_LOSSES: Final = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "discopop")
_OF_GRPO: Final = (
    "num_generations",
    "reward_funcs",
    "max_completion_length",
    "num_iterations",
    "epsilon",
    "epsilon_high",
    "scale_rewards",
    "steps_per_generation",
    "use_vllm",
    "vllm_mode",
)


def _check_openrlhf(source: Source, file: Path) -> Sequence[str]:
    """Refuse what is no run of train_ppo_ray."""
    program, options = source.program, source.options
    if program.name.rpartition(".")[2] != "train_ppo_ray":
        raise ConfigError(f"{file} starts {program.name}, not openrlhf.cli.train_ppo_ray: give a script of RL")
    if not names_model(options):
        raise ConfigError(f"{file} names no model: --actor.model_name_or_path was required, or --pretrain before 2026")
    return ()


def _check_verl(source: Source, file: Path) -> Sequence[str]:
    """Refuse what is no RL run, and report what is not known of one that is."""
    program, options = source.program, source.options
    stem = program.name.removesuffix(".py")
    for end, (what, advice) in _OTHERS.items():
        if stem.endswith(end) or f".{end}" in stem:
            raise ConfigError(f"{file} starts {program.name}, which is {what}, not an RL run to import: {advice}")
    if any(name.startswith(("worker.actor.", "worker.rollout.")) for name in options):
        raise ConfigError(
            f"{file} has options of worker.actor or worker.rollout, as EasyR1 has them; their names, counts and "
            "defaults differ from verl's: write a file of your own with the terms of docs/migrating.md"
        )
    if not any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in options):
        kind = "SFT" if any(name.startswith(("optim.", "model.")) for name in options) else "something else"
        raise ConfigError(
            f"{file} has no option of actor_rollout_ref or algorithm: it is {kind}, not an RL run to import: "
            + (_SFT_HERE if kind == "SFT" else "give a script or a configuration of verl's main_ppo")
        )
    notices = []
    if stem and stem.rsplit(".", 1)[-1].rsplit("/", 1)[-1] not in _KNOWN_PROGRAMS:
        notices.append(f"{program.name}: not known, read as verl.trainer.main_ppo")
    if program.config and not _KNOWN_CONFIGS.fullmatch(program.config):
        notices.append(f"--config-name={program.config}: what this file sets is not read; verl's defaults stand")
    return notices


def _check_trl(source: Source, file: Path) -> Sequence[str]:
    """Refuse a configuration of another trainer than GRPO."""
    options = source.options
    losses = options.get("loss_type")
    is_dpo = any(loss in _DPO_LOSSES for loss in (losses if isinstance(losses, list) else [losses]))
    is_grpo = any(name in options for name in _OF_GRPO)
    kind = next((kind for kind, names in _TRL_KINDS.items() if any(name in options for name in names)), "")
    if is_grpo and not is_dpo and kind not in ("RLOO", "PPO with a critic"):
        kind = "RLOO" if "rloo" in file.stem.lower() else ""
        if not kind:
            return ()
    learns_preferences = is_dpo or (kind == "SFT" and "beta" in options)
    kind = "DPO, or another that learns from preferences" if learns_preferences else kind or "of another trainer"
    advice = {
        "SFT": _SFT_HERE,
        "RLOO": 'take out what only RLOOConfig has, import the rest, and set algorithm.advantage = "rloo"',
        "PPO with a critic": 'write a file with algorithm.advantage = "gae" and a section critic',
        "of another trainer": f"none of {', '.join(_OF_GRPO[:3])}, … is in it: give a GRPOConfig",
        "a mixture of data sets": "give the GRPOConfig that it is used with",
        "a configuration of accelerate": "give the GRPOConfig that it is used with",
    }.get(kind, "there is no such trainer here")
    raise ConfigError(f"{file} is {kind}, not GRPO: {advice}")


def _check_prime_rl(source: Source, file: Path) -> Sequence[str]:
    if not any(name.startswith("orchestrator.") for name in source.options):
        raise ConfigError(
            f"{file}: a section orchestrator is required, as prime-rl's `rl` has it: got none; supervised training is "
            "for sft-app, inference alone for offbeat-serve"
        )
    return ()


def _read_verl(path: Path, given: Mapping[str, str]) -> Source:
    return read_options(path, is_hydra=True, given=given)


def _read_plain(path: Path, _: Mapping[str, str]) -> Source:
    return read_options(path, is_hydra=False)


def _translate_verl(source: Source) -> RecipeBuilder:
    return import_verl(source.options, source.program, source.variables)


_FRAMEWORKS: Final = {
    "verl": Framework(_read_verl, _check_verl, _translate_verl),
    "trl": Framework(_read_plain, _check_trl, lambda source: import_trl(source.options)),
    "openrlhf": Framework(read_command_line, _check_openrlhf, lambda source: import_openrlhf(source.options)),
    "prime-rl": Framework(_read_plain, _check_prime_rl, lambda source: import_prime_rl(source.options)),
}


def import_command(words: CommandWords, framework: str, file: str) -> int:
    return import_recipe(words, framework, file, program="grpo-async-app", frameworks=_FRAMEWORKS, check=_problems)


def _problems(text: str, target: Path) -> Sequence[str]:
    return check_settings(resolve(parse_config(text, GrpoConfig, name=str(target))))
