"""Seconds, tokens and memory of a training step by layout: offbeat-engine-megatron and engine-torch.

    python tools/bench/megatron_step.py [--size tiny|small|base|1b] [--model FOLDER] [--only WORD] [--steps 3] [--json]

One model, one set of sequences of unequal lengths, one run: each row trains the same updates on forked ranks, on CUDA
devices where there are enough of them and on the CPU over gloo elsewhere. A step is `forward_backward` and `step`; the
seconds are the best step's of the slowest rank, the tokens are those of the sequences (what packing or padding adds is
not counted), the memory is the largest rank's peak during the steps: resident, or allocated on the device.

engine-megatron's rows need megatron-core, engine-torch's need it; what is not installed is left out.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from bench.harness import on_ranks, parser_of, show
from bench.train_step import policy_gradient, sequence_of

from offbeat_core import TrainEngineConfig, TrainSequence, load_backend
from offbeat_device import Device, open_device
from offbeat_mesh import Mesh
from offbeat_testing import tiny_model

SIZES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {"hidden_size": 32, "num_layers": 4, "num_kv_heads": 4},
    "small": {"hidden_size": 256, "num_layers": 4, "num_kv_heads": 4, "vocab_size": 4096},
    "base": {"hidden_size": 768, "num_layers": 8, "num_heads": 12, "num_kv_heads": 4, "vocab_size": 32000},
    "1b": {"hidden_size": 2048, "num_layers": 16, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 151936},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measured row.

    Args:
        engine: "engine-megatron" or "engine-torch".
        axes: sizes of the mesh's axes that are not 1.
        options: of the engine.
        recompute: activation checkpointing.
        dtype: of the engine.
    """

    engine: str
    axes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    dtype: str = "float32"

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return prod(self.axes.values())

    @property
    def layout(self) -> str:
        """Return axes and options as text."""
        axes = " ".join(f"{axis}{size}" for axis, size in self.axes.items()) or "one rank"
        rest = [f"{name}={value}" for name, value in self.options.items()] + ["recompute"] * self.recompute
        rest += [self.dtype] * (self.dtype != "float32")
        return ", ".join([axes, *rest])


def rows() -> Iterator[Row]:
    """Yield all rows that can be measured here."""
    if find_spec("offbeat_engine_torch"):
        for axes in ({}, {"dp": 2}, {"tp": 2}):
            yield Row(engine="engine-torch", axes=axes)
    if find_spec("offbeat_engine_megatron") and find_spec("megatron"):
        for axes in ({}, {"dp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "cp": 2}):
            yield Row(engine="engine-megatron", axes=axes)
        yield Row(engine="engine-megatron", axes={"pp": 2}, options={"virtual_pipeline": 2})
        yield Row(engine="engine-megatron", recompute=True)
        for axes in ({}, {"dp": 2}):
            yield Row(engine="engine-megatron", axes=axes, dtype="bfloat16")


def make_sequences(args: argparse.Namespace, vocabulary: int) -> list[TrainSequence]:
    """Make random sequences whose lengths are spread evenly from a quarter of the longest to all of it."""
    rng = np.random.default_rng(0)
    made = []
    for length in np.linspace(args.tokens // 4, args.tokens, args.sequences).astype(int):
        advantage = rng.normal()
        made.append(sequence_of(rng.integers(1, vocabulary, length), length // 4, advantage))
    return made


def prepare(row: Row, folder: Path, sequences: list[TrainSequence], args: argparse.Namespace) -> Callable[[], None]:
    """Return what one step of a row does; the row's engine is made."""
    mesh = Mesh(**row.axes)
    config = TrainEngineConfig(
        model_path=str(folder),
        max_tokens_per_microbatch=args.budget,
        activation_checkpointing=row.recompute,
        dtype=row.dtype,
        options=row.options,
    )
    engine = load_backend("offbeat.engine", row.engine.removeprefix("engine-")).create(config, mesh)

    def step() -> None:
        engine.forward_backward(sequences, policy_gradient)
        engine.step()

    return step


def measure(row: Row, folder: Path, sequences: list[TrainSequence], args: argparse.Namespace) -> dict[str, Any]:
    """Train a row on forked ranks.

    Raises:
        RuntimeError: a rank failed; its error is on standard error.
    """

    def train(rank: int, shared: Path) -> dict[str, float]:
        torch.set_num_threads(max(1, args.threads // row.num_ranks))
        step = prepare(row, folder, sequences, args)
        return _time_steps(step, open_device(device_of(rank, row.num_ranks)), args.steps)

    times = on_ranks(row.num_ranks, train, device_of=lambda rank: device_of(rank, row.num_ranks), deadline_s=600)
    step_s, peak_mb = (max(each[name] for each in times) for name in ("step_s", "peak_mb"))
    num_tokens = sum(len(sequence.ids) for sequence in sequences)
    speed = {"step_s": step_s, "tokens_per_s": num_tokens / step_s}
    return {"engine": row.engine, "layout": row.layout, **speed, "peak_mb": peak_mb}


def device_of(rank: int, num_ranks: int) -> str:
    """Return an accelerator of its own for each rank where there are enough, else the CPU for all. Starts no driver."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    kind = accelerator.type if accelerator is not None else ""
    return f"{kind}:{rank}" if kind and torch.accelerator.device_count() >= num_ranks else "cpu"


def _time_steps(step: Callable[[], None], device: Device, num_steps: int) -> dict[str, float]:
    """Return the first step, which also makes the moments and warms up, is not counted."""
    step()
    device.reset_peak_memory()
    seconds = []
    for _ in range(num_steps):
        device.synchronize()
        start = time.perf_counter()
        step()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"step_s": min(seconds), "peak_mb": device.memory().peak_bytes / 2**20}


def main() -> None:
    """Measure all rows, or those whose name contains a word."""
    parser = parser_of(__doc__, steps=3, sequences=16, tokens=256, budget=1024, threads=2)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the random model")
    parser.add_argument("--model", type=Path, help="measure this Hugging Face folder instead")
    parser.add_argument("--only", default="", help="measure rows whose name holds this")
    args = parser.parse_args()
    if find_spec("megatron"):
        from offbeat_engine_megatron._megatron import load_megatron

        load_megatron()  # here, once: ranks are forked from this process
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny_model(Path(folder) / "model", **SIZES[args.size])
        sequences = make_sequences(args, json.loads((model / "config.json").read_text())["vocab_size"])
        wanted = [row for row in rows() if args.only in f"{row.engine}: {row.layout}"]
        show([measure(row, model, sequences, args) for row in wanted], as_json=args.json)


if __name__ == "__main__":
    main()
