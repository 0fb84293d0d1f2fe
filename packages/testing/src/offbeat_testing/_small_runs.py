"""Runs of the applications that are over in seconds."""

import json
from pathlib import Path

_GRPO = """
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_prompt_tokens = 64
[reward]
name = "number_match"
[rollout]
device = "cpu"
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
[engine]
device = "cpu"
learning_rate = 1e-4
[async]
mini_batch_size = 4
partial_rollout = true
[eval]
every_updates = 2
[checkpoint]
every = 2
[cluster]
trainer_threads = 1
rollout_threads = 1
[log]
train_generations = 100
"""


_SFT = """
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_sequence_tokens = 256
epochs = 3
[engine]
device = "cpu"
learning_rate = 3e-3
schedule = "cosine"
batch_size = 8
max_tokens_per_microbatch = 512
[eval]
every_updates = 3
[checkpoint]
every = 2
"""


def small_grpo_run(folder: Path, model: Path) -> Path:
    """Write sums to learn and a configuration: 5 updates over 20 prompts, two samples each.

    Args:
        folder: `small.toml` and `sums.jsonl` go there.
        model: a Hugging Face folder, such as `tiny_model` writes.

    Returns:
        The configuration.
    """
    data, config = folder / "sums.jsonl", folder / "small.toml"
    rows = [{"prompt": f"what is {n} and one?", "answer": str(n + 1)} for n in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(_GRPO.format(model=model, data=data))
    return config


def small_sft_run(folder: Path, model: Path) -> Path:
    """Write conversations and a configuration: 8 updates over 3 epochs of 20, the last of 4; 4 more are held out.

    Args:
        folder: `sft.toml` and `chats.jsonl` go there.
        model: as in `small_grpo_run`.

    Returns:
        The configuration.
    """
    data, config = folder / "chats.jsonl", folder / "sft.toml"
    data.write_text("".join(json.dumps({"messages": _conversation(number)}) + "\n" for number in range(24)))
    config.write_text(_SFT.format(model=model, data=data))
    return config


def _conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"what is {number} and one?"},
        {"role": "assistant", "content": f"the answer is {number + 1}"},
        {"role": "user", "content": "and one?"},
        {"role": "assistant", "content": f"{number + 2}"},
    ]
