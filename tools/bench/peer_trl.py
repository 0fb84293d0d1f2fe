"""TRL's side of vs_trl.py, in an environment of its own: notes when each step ended, or the peak of memory.

python peer_trl.py '{"kind": "grpo", "model": …, "folder": …, "steps": 3, …}'     (started by vs_trl.py)
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
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # type: ignore[import-not-found]  # its own environment

NUMBER = re.compile(r"-?\d+")


def number_match(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """Return 1 where the last number of a completion is the answer, else 0."""
    found = [NUMBER.findall(messages[0]["content"]) for messages in completions]
    return [
        float(bool(numbers) and int(numbers[-1]) == int(right)) for numbers, right in zip(found, answer, strict=True)
    ]


class StepEnds(TrainerCallback):
    """Recorder of the end of each step, in Unix seconds."""

    def __init__(self) -> None:
        self.end_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of the optimizer's step."""
        self.end_s.append(time.time())


def shared_settings(job: dict[str, Any]) -> dict[str, Any]:
    """Return what the comparison fixes, and what makes TRL fastest on a CPU."""
    return {
        "output_dir": job["folder"] + "/trainer",
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": job["dtype"] == "bfloat16",
        "gradient_checkpointing": False,  # TRL's default recomputes activations: slower
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def grpo_trainer(job: dict[str, Any], rows: list[dict[str, Any]], watch: StepEnds, microbatch: int) -> Any:
    """Return one optimizer step for all samples of a step, which are generated together.

    No KL term, no reference model.
    """
    num_samples = job.get("prompts", 1) * job.get("samples", 8)
    config = GRPOConfig(
        **shared_settings(job),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=num_samples // microbatch,
        num_generations=job.get("samples", 8),
        generation_batch_size=num_samples,
        max_completion_length=job.get("max_tokens", 8),
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
    )
    dataset = Dataset.from_list(rows)
    return GRPOTrainer(
        model=job["model"], reward_funcs=number_match, args=config, train_dataset=dataset, callbacks=[watch]
    )


def train_grpo(job: dict[str, Any], watch: StepEnds) -> list[float]:
    """Return the whole trainer, generation included."""
    rows = [json.loads(line) for line in (Path(job["folder"]) / "sums.jsonl").read_text().splitlines()]
    grpo_trainer(job, rows, watch, microbatch=16).train()
    return watch.end_s


def train_sft(job: dict[str, Any], watch: StepEnds) -> list[float]:
    """Train on given token ids, in padded batches in the same order."""
    rows = [{"input_ids": ids} for ids in json.loads((Path(job["folder"]) / "ids.json").read_text())]
    config = SFTConfig(
        **shared_settings(job),
        per_device_train_batch_size=job["batch"],
        gradient_accumulation_steps=job["sequences"] // job["batch"],
        max_length=max(len(row["input_ids"]) for row in rows),
    )
    SFTTrainer(model=job["model"], args=config, train_dataset=Dataset.from_list(rows), callbacks=[watch]).train()
    return watch.end_s


def peak_of_grpo(job: dict[str, Any], watch: StepEnds) -> list[float]:
    """Run forward and backward of given tokens in one micro-batch twice; return the peak bytes of the second time."""
    ids = torch.tensor(json.loads((Path(job["folder"]) / "ids.json").read_text()))
    prompt = [{"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}]
    trainer = grpo_trainer(job, prompt * 8, watch, microbatch=len(ids))
    mask = torch.ones_like(ids)
    inputs = {
        "prompt_ids": ids[:, : job["prompt"]],
        "prompt_mask": mask[:, : job["prompt"]],
        "completion_ids": ids[:, job["prompt"] :],
        "completion_mask": mask[:, job["prompt"] :],
        "advantages": torch.full((len(ids),), 0.5),
        "num_items_in_batch": mask[:, job["prompt"] :].sum(),
    }
    trainer.current_gradient_accumulation_steps = 1
    found = 0.0
    for _ in range(2):
        held = begin_peak()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, inputs)
        trainer.accelerator.backward(loss)
        found = status("VmHWM") - held
        trainer.model.zero_grad(set_to_none=True)
    return [found]


def begin_peak() -> float:
    """Reset the highest memory use; return the bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> float:
    """Return a line of the kernel's account of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Do the job of the first argument."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    work = {"grpo": train_grpo, "sft": train_sft, "memory": peak_of_grpo}[job["kind"]]
    (Path(job["folder"]) / "trl.json").write_text(json.dumps(work(job, StepEnds())))


if __name__ == "__main__":
    main()
