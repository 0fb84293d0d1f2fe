"""TRL's SFTConfig in our words.

Source: huggingface/trl f2cd5771 (2026-07-24), trl/trainer/sft_config.py, with transformers' TrainingArguments; names of
its scripts (`model_name_or_path`, `dataset_name`) from trl/scripts/utils.py.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from offbeat_recipes import Draft

_SCHEDULES: Final = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
_TRACKERS: Final = ("wandb", "trackio", "mlflow")

ALWAYS: Final[Mapping[str, str]] = {
    "packing*": "sequences are always packed, and never see each other",
    "eval_packing": "sequences are always packed, and never see each other",
    "padding_free": "nothing is padded",
    "pad_to_multiple_of": "nothing is padded",
    "completion_only_loss": "the loss is on answers where there is a prompt, and on all of a plain text",
    "disable_dropout": "nothing is dropped out",
    "remove_unused_columns": "columns that are not named are not read",
    "logging_steps": "every update is logged",
    "do_train": "this is `train`",
    "dataset_num_proc": "rows are encoded by the process that reads them",
    "per_device_eval_batch_size": "micro-batches are always filled by tokens",
}
MISSING: Final[Mapping[str, str]] = {
    "deepspeed": 'FSDP2 shards, or engine.backend = "megatron"',
    "fsdp*": "several ranks are always sharded: engine.num_ranks",
    "neftune_noise_alpha": "no noise",
    "loss_type": "the negative log-likelihood",
    "router_aux_loss_coef": "no loss for balance",
    "chat_template_path": "the tokenizer's",
    "eos_token": "the tokenizer's",
    "output_dir": "name the run folder: --out FOLDER",
    "run_name": "name the run folder: --out FOLDER",
    "push_to_hub": "checkpoints are Hugging Face folders: push one yourself",
    "hub_*": "checkpoints are Hugging Face folders: push one yourself",
    "lora_target_modules": "adapters on every linear layer",
    "lora_dropout": "nothing is dropped out",
}


def import_trl(options: Mapping[str, Any]) -> Draft:
    """Translate TRL's options.

    Args:
        options: fields of SFTConfig, and of the script that makes one.
    """
    draft = Draft(options)
    _write_data(draft)
    _write_trainer(draft)
    _write_rhythm(draft)
    draft.finish(ALWAYS, MISSING)
    return draft


def _write_data(draft: Draft) -> None:
    draft.copy("model.path", "model_name_or_path")
    draft.copy("model.trust_remote_code", "trust_remote_code")
    draft.copy("data.path", "dataset_name")
    for name in ("model_name_or_path", "dataset_name"):
        if draft.has(name):
            draft.change(name, "here a file or a folder: download it, nothing is fetched by name")
    draft.copy("data.split", "dataset_train_split", default="train")
    draft.copy("data.text_column", "dataset_text_field", default="text")
    longest = draft.number("max_length", "max_seq_length", default=1024)
    draft.put("data.max_sequence_tokens", longest, "max_length", "max_seq_length")
    draft.put("data.too_long", "truncate", "truncation_mode")
    if draft.take("truncation_mode", default="keep_start") != "keep_start":
        draft.change("truncation_mode", "the end is cut off, not the beginning")
    draft.copy("data.shuffle", "shuffle_dataset", default=True)
    only_assistant = draft.take("assistant_only_loss", default=False)
    if not only_assistant:
        draft.change("assistant_only_loss", "of a conversation the loss is on the assistant's turns, as if it were set")


def _write_trainer(draft: Draft) -> None:
    is_half = draft.take("fp16", default=False)
    low = draft.take("bf16", default=not is_half)
    draft.put("engine.dtype", "bfloat16" if low else "float32", "bf16")
    if is_half:
        draft.change("fp16", "the trainer computes in float32 or bfloat16")
    draft.copy("engine.learning_rate", "learning_rate", default=2e-5)
    kind = draft.take("lr_scheduler_type", default="linear")
    draft.put("engine.schedule", _SCHEDULES.get(kind, "constant"), "lr_scheduler_type")
    if kind not in _SCHEDULES:
        draft.change("lr_scheduler_type", "constant, linear and cosine are there: constant takes its place")
    warmup = draft.number("warmup_steps", default=0)
    if warmup >= 1:
        draft.put("engine.warmup_steps", int(warmup), "warmup_steps")
    for name, share in (("warmup_steps", 0 < warmup < 1), ("warmup_ratio", draft.take("warmup_ratio"))):
        if share:
            draft.miss(name, "a share of all steps: give engine.warmup_steps as their number")
    draft.copy("engine.weight_decay", "weight_decay", default=0.0)
    draft.copy("engine.adam_beta1", "adam_beta1", default=0.9)
    draft.copy("engine.adam_beta2", "adam_beta2", default=0.999)
    draft.copy("engine.max_grad_norm", "max_grad_norm", default=1.0)
    draft.copy("engine.activation_checkpointing", "gradient_checkpointing", default=True)
    uses_lora = draft.take("use_peft", default=draft.has("lora_r"))
    rank, alpha = draft.take("lora_r", default=16), draft.take("lora_alpha", default=32)
    if uses_lora:
        draft.put("engine.lora_rank", rank, "lora_r")
        draft.put("engine.lora_alpha", float(alpha), "lora_alpha")
    ranks = draft.number("num_processes", default=1)
    if not draft.has("num_processes"):
        draft.change(
            "num_processes", "accelerate's, and not in this file: 1 is taken; engine.num_ranks multiplies batches"
        )
    batch = draft.number("per_device_train_batch_size", default=8) * ranks
    batch *= draft.number("gradient_accumulation_steps", default=1)
    draft.put("engine.num_ranks", ranks, "num_processes")
    draft.put("engine.batch_size", batch, "per_device_train_batch_size", "gradient_accumulation_steps")
    for key in ("engine.seed", "data.seed"):
        draft.copy(key, "seed", default=42)


def _write_rhythm(draft: Draft) -> None:
    draft.copy("data.epochs", "num_train_epochs", default=3, convert=math.ceil)
    steps = draft.number("max_steps", default=-1)
    if steps > 0:
        draft.put("engine.max_updates", steps, "max_steps")
        draft.put("data.epochs", 0, "max_steps")
    strategy, every = draft.take("eval_strategy", default="no"), draft.number("eval_steps", default=0)
    if strategy == "steps" and every:
        draft.put("eval.every_updates", int(every), "eval_steps")
        draft.put("data.eval_size", 64, "eval_strategy")
        draft.change("eval_strategy", "the held-out rows are given in code there; here 64 are held out: data.eval_path")
    elif strategy != "no":
        draft.miss("eval_strategy", "validation counts updates: give eval.every_updates")
    saves, every = draft.take("save_strategy", default="steps"), draft.number("save_steps", default=500)
    draft.put("checkpoint.every", int(every) if saves == "steps" else 0, "save_steps")
    draft.copy("checkpoint.keep", "save_total_limit")
    found = draft.take("report_to")
    names = found if isinstance(found, list) else [found]
    if trackers := [name for name in names if name in _TRACKERS]:
        draft.put("log.trackers", trackers, "report_to")
