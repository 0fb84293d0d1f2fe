"""Share of weights rounded to bfloat16 that an optimizer step changes, and the number of bytes that describe them.

    python tools/bench/weight_changes.py FOLDER [--learning-rate 1e-6 1e-5] [--steps 4] [--json]

The steps are those of the torch engine (AdamW, float32 weights) on random tokens with random advantages: their
gradients are noise, so no weight moves steadily. FOLDER is that of a Hugging Face model.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.harness import Row, show

from offbeat_core import TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_weightsync._changes import encode_run

TOKENS, RUN = 48, 1 << 18


def sequences(seed: int, vocabulary: int) -> list[TrainSequence]:
    """Make two short sequences."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(2):
        ids = draw.integers(0, vocabulary, TOKENS).astype(np.int32)
        advantage = np.full(TOKENS, draw.normal(), np.float32)
        made.append(TrainSequence(ids=ids, loss_mask=np.arange(TOKENS) >= 8, extras={"advantage": advantage}))
    return made


def policy_gradient(tokens: Any) -> tuple[Any, dict[str, Any]]:
    """Return the policy gradient for the tokens' advantages."""
    return -(tokens.logprobs_N * tokens.extras["advantage"]).sum() / tokens.total_tokens, {}


def measure(folder: str, learning_rate: float, steps: int) -> list[Row]:
    """Return one row for each step."""
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=folder, device="cpu", learning_rate=learning_rate))
    held = rounded(engine)
    rows: list[Row] = []
    for step in range(steps):
        engine.forward_backward(sequences(step, engine.vocabulary_size), policy_gradient)
        engine.step()
        now = rounded(engine)
        changed, sent = zip(*(compare(held[name], now[name]) for name in now), strict=True)
        size = sum(map(len, now.values()))
        rows.append(
            {
                "learning_rate": learning_rate,
                "step": step + 1,
                "share_changed": sum(changed) / size,
                "sent_mb": sum(sent) / 1e6,
                "share_of_bytes": sum(sent) / (2 * size),
            }
        )
        held = now
    return rows


def rounded(engine: TorchTrainEngine) -> dict[str, np.ndarray]:
    """Return the bits of each tensor."""
    return {
        name: tensor.bfloat16().view(torch.int16).reshape(-1).numpy().view("u2") for name, tensor in engine.weights()
    }


def compare(old: np.ndarray, new: np.ndarray) -> tuple[int, int]:
    """Count changed elements, and the bytes that describe them."""
    sent = sum(len(encode_run(old[i : i + RUN], new[i : i + RUN]).data) for i in range(0, len(new), RUN))
    return int(np.count_nonzero(old != new)), sent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for rate in arguments.learning_rate for row in measure(arguments.folder, rate, arguments.steps)]
    show(rows, as_json=arguments.json, title=arguments.folder)


if __name__ == "__main__":
    main()
