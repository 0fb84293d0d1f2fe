"""A training step on the device and on the CPU: losses, gradient norms, log-probabilities and weights.

Both hold the same tiny model in float32, with products in full float32. Adam's epsilon is large, so that an update is
proportional to its gradient: with the usual one a gradient near zero decides by its sign.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.piece import Figures, Place, main, require, require_close

from offbeat_core import LossTokens, Metrics, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model

FLOAT32_BOUND = 2e-4
"""Bound of losses, norms and updates relative to themselves, of log-probabilities in nats: two orders of summing."""
BFLOAT16_BOUND = 0.1
"""Nats, the mean over tokens: 8 bits of each activation."""


def make_sequences(num_prompts: int, num_samples: int, num_tokens: int) -> list[TrainSequence]:
    """Make groups that share their prompts, with completions of different lengths."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(num_prompts):
        prompt = rng.integers(3, 300, num_tokens)
        for _ in range(num_samples):
            ids = np.concatenate([prompt, rng.integers(3, 300, rng.integers(2, num_tokens))]).astype(np.int32)
            extras = {"advantage": rng.normal(size=len(ids)).astype(np.float32)}
            found.append(TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt), extras=extras))
    return found


def policy_gradient(tokens: LossTokens[Any]) -> tuple[Any, Metrics]:
    """Return the plainest policy loss."""
    return -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens, {}


def train(engine_type: Any, folder: Path, device: str, sequences: list[TrainSequence]) -> dict[str, Any]:
    """Train two steps; return metrics, the log-probabilities between them, and the first update of each weight."""
    config = TrainEngineConfig(
        model_path=str(folder), device=device, learning_rate=1.0, adam_eps=1.0, weight_decay=0.0, max_grad_norm=1e9
    )
    engine = engine_type.create(config)
    before = {name: tensor.float().cpu().clone() for name, tensor in engine.weights()}
    losses, norms = [], []
    for _ in range(2):
        losses.append(engine.forward_backward(sequences, policy_gradient)["loss"].value)
        norms.append(engine.step()["grad_norm"].value)
        if len(losses) == 1:
            logprobs = np.concatenate(engine.logprobs(sequences))
            update = {name: tensor.float().cpu() - before[name] for name, tensor in engine.weights()}
    engine.close()
    return {"losses": losses, "norms": norms, "logprobs": logprobs, "update": update}


def coarse_logprobs(folder: Path, device: str, sequences: list[TrainSequence]) -> "np.ndarray[Any, Any]":
    """Compute log-probabilities before any step, with the layers' products in bfloat16."""
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device=device, dtype="bfloat16"))
    found = np.concatenate(engine.logprobs(sequences))
    engine.close()
    return found


def relative(one: list[float], other: list[float]) -> float:
    """Return the largest difference, relative where above 1."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True))


def errors_between(here: dict[str, Any], there: dict[str, Any]) -> dict[str, float]:
    """Return the errors of what `train` returned."""
    names = there["update"].keys() & here["update"].keys()
    alone = [name for name in there["update"].keys() ^ here["update"].keys() if ".experts." not in name]
    require(not alone, f"weights of one engine alone: {alone}")  # experts are stacked in one, single in the other
    largest = max(float(update.abs().max()) for update in there["update"].values())
    apart = max(float((here["update"][name] - there["update"][name]).abs().max()) for name in names)
    return {
        "loss": relative(here["losses"], there["losses"]),
        "gradient_norm": relative(here["norms"], there["norms"]),
        "logprobs_nats": float(np.abs(here["logprobs"] - there["logprobs"]).max()),
        "update": apart / largest,
    }


def require_bounds(errors: dict[str, float]) -> None:
    """Raise CheckError where an error of `errors_between` is out of its bound."""
    for what, error in errors.items():
        require_close(what, error, FLOAT32_BOUND)


def run(place: Place) -> Figures:
    """Compare device and CPU."""
    torch.set_float32_matmul_precision("highest")
    sequences = make_sequences(place.pick(2, 8), 4, place.pick(12, 200))
    with tempfile.TemporaryDirectory() as temporary:
        folder = tiny_model(Path(temporary) / "model", "qwen3", hidden_size=place.pick(64, 512))
        here, there = (train(TorchTrainEngine, folder, name, sequences) for name in (place.name, "cpu"))
        fine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu")).logprobs(sequences)
        coarse_error = float(np.abs(coarse_logprobs(folder, place.name, sequences) - np.concatenate(fine)).mean())
    errors = errors_between(here, there)
    figures = {**errors, "bfloat16_logprobs_mean_nats": coarse_error}
    place.note(figures)
    require_bounds(errors)
    require_close("bfloat16", coarse_error, BFLOAT16_BOUND)
    return figures


if __name__ == "__main__":
    main(run)
