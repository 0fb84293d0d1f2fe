"""TRL's SFTConfig in our words.

Source: huggingface/trl f2cd5771 (2026-07-24), trl/trainer/sft_config.py, with transformers' TrainingArguments; names of
its scripts (`model_name_or_path`, `dataset_name`) from trl/scripts/utils.py.
"""

from collections.abc import Mapping
from typing import Any, Final

from offbeat_recipes import Draft, write_rhythm, write_training_arguments

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
    """Translate fields of SFTConfig, and of the script that makes one."""
    draft = Draft(options)
    _write_data(draft)
    write_training_arguments(draft, learning_rate=2e-5, roles=("engine",))
    _write_batch(draft)
    write_rhythm(draft)
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


def _write_batch(draft: Draft) -> None:
    ranks = draft.number("num_processes", default=1)
    if not draft.has("num_processes"):
        draft.change(
            "num_processes", "accelerate's, and not in this file: 1 is taken; engine.num_ranks multiplies batches"
        )
    batch = draft.number("per_device_train_batch_size", default=8) * ranks
    batch *= draft.number("gradient_accumulation_steps", default=1)
    draft.put("engine.num_ranks", ranks, "num_processes")
    draft.put("engine.batch_size", batch, "per_device_train_batch_size", "gradient_accumulation_steps")
