"""A whole GRPO run of Qwen3-0.6B's shape, trainer and engine on one device at once, beside TRL.

8 prompts x 8 samples of 128 new tokens with the application's defaults. TRL runs the same sizes by its own `generate`
where it is installed. It passes with 100 samples a second.
"""

import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import Figures, Place, main, reach
from gpu.shapes import make_model
from gpu.whole_run import NEW_TOKENS, PROMPTS, SAMPLES, train

GOALS = {"samples_per_s": 100.0}
LIMIT_S = 200.0
TRL_STEPS = 5


def samples_per_s_by_trl(folder: Path, model: Path, place: Place) -> float:
    """Return the samples a second of TRL's GRPOTrainer, without its first step."""
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    transformers: Any = import_module("transformers")
    ends_s: list[float] = []

    class StepEnds(transformers.TrainerCallback):  # type: ignore[misc]
        """Notes when steps end."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends_s.append(time.perf_counter())

    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=TRL_STEPS,
        model_init_kwargs={"dtype": "float32"},
        bf16=place.is_accelerator,
        use_cpu=not place.is_accelerator,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=place.pick(8, NEW_TOKENS),
        beta=0.0,
    )
    prompts = [{"prompt": [{"role": "user", "content": f"{n}+{n + 1}="}]} for n in range(PROMPTS * TRL_STEPS)]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    trl.GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[StepEnds()],
    ).train()
    return PROMPTS * SAMPLES * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def run(place: Place) -> Figures:
    """Run ours, then TRL's."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model", tiny=place.tiny, device=place.device.torch_device)
        place.device.release_unused()
        figures = dict(train(folder, model, place, "", LIMIT_S))
        if find_spec("trl") is None:
            figures["trl"] = "no trl"
        else:
            figures["samples_per_s_by_trl"] = samples_per_s_by_trl(folder, model, place)
        place.note(figures)
    return reach(place, figures, GOALS)


if __name__ == "__main__":
    main(run)
