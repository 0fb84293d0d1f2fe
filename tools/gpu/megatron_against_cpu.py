"""A training step by megatron-core on the device, and by the torch engine on the CPU.

One process, and a world of one. Both hold the same tiny model in float32, with products in full float32; what is
compared, and its bounds, are those of `trainer_against_cpu`. A dense model, and one with experts.
"""

import sys
import tempfile
from pathlib import Path
from typing import Final, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.piece import Figures, Place, main
from gpu.trainer_against_cpu import errors_between, make_sequences, require_bounds, train

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_model

FAMILIES: Final[dict[Literal["qwen3", "qwen3_moe"], int]] = {"qwen3": 512, "qwen3_moe": 256}
"""And their width. Wide random experts make the most of a rounding: at 512 two engines on one CPU are 2.8e-4 apart."""


def run(place: Place) -> Figures:
    """Compare the two engines."""
    torch.set_float32_matmul_precision("highest")
    sequences = make_sequences(place.pick(2, 8), 4, place.pick(12, 200))
    figures: dict[str, float] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = tiny_model(Path(temporary) / "model", family, hidden_size=place.pick(64, FAMILIES[family]))
            there = train(TorchTrainEngine, folder, "cpu", sequences)
            here = train(MegatronTrainEngine, folder, place.name, sequences)
        figures |= {f"{what} {family}": error for what, error in errors_between(here, there).items()}
        place.note(figures)
    require_bounds(figures)
    return figures


if __name__ == "__main__":
    main(run)
