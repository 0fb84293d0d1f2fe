"""The peer of vs_trl.py: GRPO with TRL, in an environment of its own. Writes when each step ended, and its lengths.

python peer_trl.py '{"model": …, "data": …, "out": …, "steps": 3, …}'     (started by vs_trl.py)
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # only in its own environment

NUMBER = re.compile(r"-?\d+")


def number_match(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a completion is the answer, else 0."""
    found = [NUMBER.findall(messages[0]["content"]) for messages in completions]
    return [
        float(bool(numbers) and int(numbers[-1]) == int(right)) for numbers, right in zip(found, answer, strict=True)
    ]


class StepRows(TrainerCallback):
    """Notes the end of each step, and the figures TRL logs for it right after."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called after the optimizer's step."""
        self.rows.append({"end_s": time.time()})

    def on_log(self, *_: Any, **values: Any) -> None:
        """Called once per step, as logging_steps is 1, and once at the end with other names."""
        logs = values["logs"]
        if "completions/mean_length" in logs:
            self.rows[-1] |= {"tokens": logs["completions/mean_length"], "reward": logs["reward"]}


def configure(job: dict[str, Any]) -> GRPOConfig:
    """TRL's settings: what the comparison fixes, and what makes TRL fastest on a CPU."""
    num_samples = job["prompts"] * job["samples"]
    return GRPOConfig(
        output_dir=job["out"] + "-trainer",
        max_steps=job["steps"],
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=num_samples // job["microbatch"],  # one optimizer step for all samples
        num_generations=job["samples"],
        generation_batch_size=num_samples,  # all samples of a step are generated together
        max_completion_length=job["max_tokens"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,  # no KL term and no reference model
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # TRL's default recomputes activations: slower, and memory is no problem here
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    """Train as the first argument says."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    watch = StepRows()
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=number_match,
        args=configure(job),
        train_dataset=Dataset.from_list(rows),
        callbacks=[watch],
    )
    trainer.train()
    Path(job["out"]).write_text(json.dumps(watch.rows))


if __name__ == "__main__":
    main()
