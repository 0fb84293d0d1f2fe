"""The `data` section: what to learn from."""

from dataclasses import dataclass
from typing import Any

from offbeat_types import REQUIRED, setting


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """What prompts and conversations share: where rows come from, how they are rendered, and in which order served."""

    path: str = setting(
        REQUIRED,
        "A .jsonl or .parquet file, a folder of them (or with them in data/, as the Hub has it), a folder written by "
        "datasets' save_to_disk, reasoning-gym:TASK, verifiers:NAME, arithmetic:DIGITS (sums) or products:DIGITS.",
    )
    split: str = setting(
        "train", "Split to read where path holds several: a saved DatasetDict, or files such as train-*.parquet."
    )
    num_items: int = setting(0, "Items to draw or read at most; 0: all of a file, 1000 of a generator.", "items", ge=0)
    seed: int = setting(0, "Seed of what a generator draws, of what is held out, and of the order.", ge=0)
    task_options: dict[str, Any] = setting(
        {}, "Options of the reasoning-gym task, such as {min_terms = 2}; arguments of the verifiers environment."
    )

    eval_path: str = setting("", "Held-out data, in any form path takes; empty: hold out eval_size items of path.")
    eval_split: str = setting(
        "", "Split to read as held-out data: of eval_path (empty: train), or of path when eval_path is empty."
    )
    eval_size: int = setting(0, "Items held out of path, or read from eval_path at most (0: all of it).", "items", ge=0)

    prompt_column: str = setting("prompt", "Column of the prompt: a text, or a list of chat messages.")

    system_prompt: str = setting("", "Put before every conversation that has no system message of its own.")
    chat_template: str = setting(
        "auto", "Use the tokenizer's chat template: auto does when it has one.", choices=("auto", "on", "off")
    )
    template_options: dict[str, Any] = setting(
        {}, "Variables for the chat template, such as {enable_thinking = false}."
    )

    shuffle: bool = setting(True, "Serve items in a new random order each epoch.")
    epochs: int = setting(1, "Passes over the data; 0: until the run ends for another reason.", "epochs", ge=0)


@dataclass(frozen=True, kw_only=True)
class DataConfig(SourceConfig):
    """Prompts for reinforcement learning: where they come from, what their columns mean, how long they may be."""

    answer_column: str = setting(
        "answer", "Column of the reference answer that rewards compare with; reward_model.ground_truth: a part of one."
    )
    max_prompt_tokens: int = setting(1024, "Longer prompts are left out and counted.", "tokens", ge=1)


@dataclass(frozen=True, kw_only=True)
class ConversationConfig(SourceConfig):
    """Conversations for supervised fine-tuning: where they come from, their columns, how long they may be."""

    messages_column: str = setting("messages", "Column of whole conversations.")
    completion_column: str = setting("completion", "Column of the answer to learn, beside prompt_column.")
    text_column: str = setting("text", "Column of plain text to learn as it stands.")
    max_sequence_tokens: int = setting(4096, "Longest sequence; see too_long.", "tokens", ge=2)
    too_long: str = setting(
        "filter", "Leave longer sequences out, or cut off their end.", choices=("filter", "truncate")
    )
