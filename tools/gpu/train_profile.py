"""Kernels of one training step: a Qwen3 of 0.6 B parameters, and two layers of Qwen3-8B with next to no vocabulary.

8 sequences of 1,024 tokens with random weights, products in bfloat16; with the defaults, which compile the layers, and
with the layers as they are written. It passes by default with 85,000 tokens a second of the first, and with a share of
the peak (MFU) of 45 % of the second.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.kernels import recorded
from gpu.piece import Figures, Place, device_name, main, peaks_of, reach, share
from gpu.shapes import PAIR_OF_8B, QWEN3_0_6B, TINY, Shape, make_model
from gpu.trainer_against_cpu import policy_gradient
from gpu.training_speed import open_trainer

SHAPES = {"0.6B": QWEN3_0_6B, "pair of 8B": PAIR_OF_8B}
OPTIONS = {"by default": {}, "as written": {"compile_layers": "off"}}
GOALS = {"tokens_per_s, 0.6B by default": 85_000.0, "mfu, pair of 8B by default": 0.45}


def measure(place: Place, folder: Path, shape: Shape, of: str, options: dict[str, str]) -> dict[str, Any]:
    """Return speed and kernels of a step."""
    engine, sequences = open_trainer(place, folder, options)
    num, length = len(sequences), len(sequences[0].ids)
    place.device.reset_peak_memory()

    def step() -> None:
        engine.forward_backward(sequences, policy_gradient)
        engine.step()

    step()
    step_s = place.seconds(step)
    peaks = peaks_of(device_name(place.device))
    tflops = shape.training_operations(num, length) / step_s / 1e12
    figures: dict[str, Any] = {
        f"tokens_per_s, {of}": num * length / step_s,
        f"step_s, {of}": step_s,
        f"mfu, {of}": share(tflops, peaks.bfloat16_tflops if peaks else None),
        f"peak_gib, {of}": place.device.memory().peak_bytes / 2**30,
    }
    place.note(figures)
    with recorded(place) as kernels:
        step()
    figures |= kernels.figures(of, step_s)
    place.note(figures)
    engine.close()
    place.device.release_unused()
    return figures


def run(place: Place) -> Figures:
    """Measure both shapes, compiled and as they are written."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, shape in SHAPES.items():
            folder = make_model(Path(temporary) / name, shape, tiny=place.tiny, device=place.device.torch_device)
            for how, options in OPTIONS.items():
                figures |= measure(place, folder, TINY if place.tiny else shape, f"{name} {how}", options)
    return reach(place, figures, GOALS)


if __name__ == "__main__":
    main(run)
