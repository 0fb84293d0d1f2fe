"""A run of grpo-async-app that is over in seconds."""

import json
from pathlib import Path

_CONFIG = """
[model]
path = "{model}"
[data]
path = "{data}"
eval_size = 4
max_prompt_tokens = 64
[reward]
name = "number_match"
[rollout]
samples_per_prompt = 2
max_tokens = 8
max_model_len = 96
[engine]
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
    config.write_text(_CONFIG.format(model=model, data=data))
    return config
