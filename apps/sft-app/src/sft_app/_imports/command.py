"""`sft-app import FRAMEWORK FILE`: writes our TOML, and reports what was not carried over. Here: verl.

Source: volcengine/verl b178a3cd (2026-01-29), verl/trainer/config/sft_trainer.yaml (`fsdp_sft_trainer`) and
sft_trainer_engine.yaml (`sft_trainer`), with optim/fsdp.yaml and model/hf_model.yaml.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from offbeat_core import ConfigError, parse_config
from offbeat_recipes import (
    Framework,
    RecipeBuilder,
    Source,
    import_recipe,
    read_option_table,
    read_options,
    write_betas,
    write_trackers,
)
from offbeat_run import CommandWords
from sft_app._config import SftConfig
from sft_app._imports.trl import PREFERENCE_TRAINERS, check_supervised, import_preferences, import_supervised

_OF_RL: Final = ("actor_rollout_ref.", "algorithm.", "reward_funcs", "num_generations")


def _check_kind(source: Source, file: Path) -> Sequence[str]:
    """Refuse what is no supervised fine-tuning."""
    if found := [name for name in source.options if name.startswith(_OF_RL)]:
        raise ConfigError(f"{file} is of reinforcement learning ({found[0]}): import it with grpo-async-app")
    return ()


_SHARES: Final = ("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")
_SCHEDULES: Final = ("constant", "linear", "cosine")


def import_verl(source: Source) -> RecipeBuilder:
    """Translate the options of verl's supervised trainers, by full name."""
    draft = RecipeBuilder(source.options)
    _write_verl_data(draft)
    _write_verl_trainer(draft)
    _write_verl_rhythm(draft)
    draft.finish(read_option_table(__package__, "verl"))
    return draft


def _write_verl_data(draft: RecipeBuilder) -> None:
    draft.copy("model.path", "model.partial_pretrain", "model.path")
    draft.copy("model.trust_remote_code", "model.trust_remote_code")
    for key, name in (("data.path", "data.train_files"), ("data.eval_path", "data.val_files")):
        files = draft.take(name)
        if files is not None:
            draft.put(key, files[0] if isinstance(files, list) else files, name)
            if isinstance(files, list) and len(files) > 1:
                draft.lose(
                    name,
                    f"only the first of {len(files)} files is read: link all of them into one folder and name that",
                )
    for key, name in (("data.prompt_column", "prompt"), ("data.completion_column", "response")):
        column, inner = draft.take(f"data.{name}_key"), draft.take(f"data.{name}_dict_keys")
        inner = inner if isinstance(inner, list) else [inner] if isinstance(inner, str) else []
        if column is not None:  # a column of mappings, and the keys of it that are read
            draft.put(key, ".".join([column, *inner[:1]]), f"data.{name}_key", f"data.{name}_dict_keys")
        if len(inner) > 1:
            draft.lose(f"data.{name}_dict_keys", f"one part of a column: the first of {len(inner)}")
    draft.copy("data.num_items", "data.train_max_samples", convert=lambda number: max(number, 0))
    if "data.eval_path" in draft.entries:
        draft.copy("eval.max_sequences", "data.val_max_samples", convert=lambda number: max(number, 0))
    draft.copy("data.messages_column", "data.messages_key", "data.multiturn.messages_key")
    draft.copy("data.max_sequence_tokens", "data.max_length", default=1024)
    how = draft.take("data.truncation", default="error")
    draft.put("data.too_long", "truncate" if how == "right" else "filter", "data.truncation")
    if how not in ("right", "error"):
        draft.change("data.truncation", f"{how} is not there: longer sequences are left out and counted")
    prefix = "data.apply_chat_template_kwargs."
    names = [name for name in draft.left if name.startswith(prefix)]
    if options := {name.removeprefix(prefix): value for name in names if (value := draft.take(name)) is not None}:
        draft.put("data.template_options", options, *names)


def _write_verl_trainer(draft: RecipeBuilder) -> None:
    kind = draft.take("model.fsdp_config.model_dtype", "engine.model_dtype", default="fp32")
    draft.take("engine.dtype")
    draft.put("engine.dtype", "bfloat16", "engine.dtype")  # under autocast, whatever the stored weights are
    if kind != "fp32":
        draft.change("model.fsdp_config.model_dtype", "the optimizer always holds float32 weights")
    draft.copy("engine.batch_size", "data.train_batch_size", default=256)
    names = "ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"
    if (sharing := draft.count(*names, default=1)) > 1:
        draft.put("engine.options", {"context_parallel": sharing}, *names)
    budget = "data.max_token_len_per_gpu"
    draft.copy("engine.max_tokens_per_microbatch", budget, convert=lambda number: number * sharing)
    draft.copy("engine.learning_rate", "optim.lr", default=1e-5)
    write_betas(draft, "optim.betas", (0.9, 0.95))
    draft.copy("engine.weight_decay", "optim.weight_decay", default=0.01)
    draft.copy("engine.max_grad_norm", "optim.clip_grad", default=1.0)
    names = ("optim.lr_scheduler", "optim.lr_scheduler_type")
    kind = draft.take(*names, default="cosine")
    draft.put("engine.schedule", kind if kind in _SCHEDULES else "constant", *names)
    if kind not in _SCHEDULES:
        draft.lose(draft.named(*names), f"{kind} is not supported: using constant instead")
    draft.copy("engine.min_learning_rate_ratio", "optim.min_lr_ratio")
    steps = draft.number("optim.lr_warmup_steps", default=-1)
    share = draft.take(*_SHARES, default=0.1 if draft.has("model.partial_pretrain") else 0.0)
    if steps >= 0:
        draft.put("engine.warmup_steps", steps, "optim.lr_warmup_steps")
    elif share:
        draft.lose(draft.named(*_SHARES), f"{share} of all steps: give engine.warmup_steps as their number")
    draft.copy("engine.activation_checkpointing", "model.enable_gradient_checkpointing", default=True)
    if draft.number("model.lora_rank", default=0):
        draft.copy("engine.lora_rank", "model.lora_rank")
        draft.copy("engine.lora_alpha", "model.lora_alpha", default=16, convert=float)
    nodes, per_node = draft.number("trainer.nnodes", default=1), draft.number("trainer.n_gpus_per_node", default=8)
    draft.put("engine.num_ranks", nodes * per_node, "trainer.n_gpus_per_node", "trainer.nnodes")
    if nodes > 1:
        draft.put("cluster.launcher", "ray", "trainer.nnodes")
    draft.change("trainer.n_gpus_per_node", "torchrun's --nproc_per_node there; engine.num_ranks starts the ranks here")
    draft.copy(("engine.seed", "data.seed"), "trainer.seed", default=1)
    draft.copy("engine.device", "trainer.device")


def _write_verl_rhythm(draft: RecipeBuilder) -> None:
    draft.copy("data.epochs", "trainer.total_epochs", default=4)
    steps = draft.number("trainer.total_training_steps", default=0)
    if steps:
        draft.put("engine.max_updates", steps, "trainer.total_training_steps")
    for key, name in (("checkpoint.every", "trainer.save_freq"), ("eval.every_updates", "trainer.test_freq")):
        draft.put(key, max(draft.number(name, default=-1), 0), name)
    draft.copy("checkpoint.keep", "trainer.max_ckpt_to_keep")
    write_trackers(draft, "trainer.logger")
    if "log.trackers" in draft.entries:
        draft.copy("log.project", "trainer.project_name")


def _read_plain(path: Path, given: Mapping[str, str] | None) -> Source:
    return read_options(path, is_hydra=False)


def _check_supervised(source: Source, file: Path) -> Sequence[str]:
    notices = _check_kind(source, file)
    check_supervised(source, file)
    return notices


_FRAMEWORKS: Final = {
    "verl": Framework(lambda path, given: read_options(path, is_hydra=True, given=given), _check_kind, import_verl),
    "trl": Framework(_read_plain, _check_supervised, import_supervised),
    **{
        f"trl-{trainer}": Framework(_read_plain, _check_kind, partial(import_preferences, trainer))
        for trainer in PREFERENCE_TRAINERS
    },
}


def import_command(words: CommandWords, framework: str, file: str) -> int:
    return import_recipe(words, framework, file, program="sft-app", frameworks=_FRAMEWORKS, check=_check)


def _check(text: str, target: Path) -> Sequence[str]:
    parse_config(text, SftConfig, name=str(target))
    return ()
