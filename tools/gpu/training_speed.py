"""A step of 0.6 B parameters at 8,192 tokens: tokens a second, and the share of the peak (MFU).

A Qwen3 with random weights, products of the layers in bfloat16, 8 sequences of 1,024 tokens in one micro-batch, every
token but the first a loss token; forward, backward and AdamW. Operations are those of the products and of causal
attention; what is computed a second time does not count. It passes where no speed is below 0.8 of the one
recorded on the same device. Source: PaLM (arXiv:2204.02311), appendix B.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from gpu.piece import Figures, Place, device_name, main, peaks_of, require_recorded_speed, share
from gpu.shapes import QWEN3_0_6B, make_model
from gpu.trainer_against_cpu import policy_gradient

from offbeat_core import TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine


def make_sequences(num: int, length: int) -> list[TrainSequence]:
    """Make sequences of random tokens."""
    rng = np.random.default_rng(0)
    extras = {"advantage": np.ones(length, np.float32)}
    return [
        TrainSequence(ids=rng.integers(3, 300, length).astype(np.int32), loss_mask=np.arange(length) > 0, extras=extras)
        for _ in range(num)
    ]


def open_trainer(place: Place, folder: Path, options: dict[str, str]) -> tuple[TorchTrainEngine, list[TrainSequence]]:
    """Open an engine, and make the sequences of its one micro-batch."""
    num, length = 8, place.pick(16, 1024)
    config = TrainEngineConfig(
        model_path=str(folder),
        device=place.name,
        dtype="bfloat16",
        learning_rate=1e-6,
        max_tokens_per_microbatch=num * length,
        options=options,
    )
    return TorchTrainEngine.create(config), make_sequences(num, length)


def measure(place: Place, folder: Path, name: str, options: dict[str, str]) -> dict[str, float | None]:
    """Return the figures of one engine, each with `name` behind it."""
    engine, sequences = open_trainer(place, folder, options)
    num, length = len(sequences), len(sequences[0].ids)
    place.device.reset_peak_memory()

    def step() -> None:
        engine.forward_backward(sequences, policy_gradient)
        engine.step()

    passes_s = place.seconds(lambda: engine.forward_backward(sequences, policy_gradient))
    step_s = place.seconds(step)
    peak_gib = place.device.memory().peak_bytes / 2**30
    engine.close()
    peaks = peaks_of(device_name(place.device))
    tflops = QWEN3_0_6B.training_operations(num, length) / step_s / 1e12
    name = f", {name}"
    speed = {f"tokens_per_s{name}": num * length / step_s, f"peak_gib{name}": peak_gib}
    times = {f"step_s{name}": step_s, f"forward_backward_s{name}": passes_s}
    if place.tiny:
        return {**speed, **times}
    mfu = share(tflops, peaks.bfloat16_tflops if peaks else None)
    return {**speed, **times, f"tflops{name}": tflops, f"mfu{name}": mfu}


def run(place: Place) -> Figures:
    """Measure both formats of the head with the layers as they are written, and what the defaults give."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(Path(temporary) / "model", tiny=place.tiny, device=place.device.torch_device)
        figures: dict[str, float | None] = {}
        plain = {"compile_layers": "off"}
        for name, options in {
            "by default": {},
            "head bfloat16": {"head_dtype": "bfloat16", **plain},
            "head float32": {"head_dtype": "float32", **plain},
        }.items():
            figures |= measure(place, folder, name, options)
            place.note(figures)
    if not place.tiny:
        require_recorded_speed("training_speed", device_name(place.device), figures)
    return figures


if __name__ == "__main__":
    main(run)
