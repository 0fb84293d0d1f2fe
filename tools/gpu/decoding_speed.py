"""Tokens a second of the embedded engine at batch 1 and 64, and the share of the memory's bandwidth.

A Qwen3 of 0.6 B parameters with random weights, bfloat16, prompts of 128 tokens, 256 new ones, with recorded steps
(CUDA graphs) and without, and beside them transformers' `generate`. It passes where no speed is below 0.8 of the one
recorded on the same device. A step reads every weight once and the keys and
values of each sample; what it reads, over its time, is the bandwidth that was reached.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.piece import Figures, Place, device_name, main, peaks_of, require_recorded_speed, share
from gpu.shapes import QWEN3_0_6B, make_model

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams
from offbeat_rollout_torch import TorchRolloutEngine


async def open_engine(place: Place, folder: Path, **options: Any) -> TorchRolloutEngine:
    """Open an engine for 64 samples in static rows, as it decodes on a GPU by default."""
    settings = RolloutEngineConfig(
        model_path=str(folder),
        device=place.name,
        dtype="bfloat16",
        max_model_len=place.pick(64, 512),
        max_running=64,
        options={"static_rows": True, **options},
    )
    return await TorchRolloutEngine.create(settings)


async def seconds_of(engine: TorchRolloutEngine, batch: int, prompt: int, new: int) -> float:
    """Return the seconds of one batch, prompts included."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=new, ignore_eos=True, seed=1)
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=rng.integers(3, 300, prompt).astype(np.int32), params=params)
        for i in range(batch)
    ]
    start_s = time.perf_counter()
    await asyncio.gather(*map(engine.generate, requests))
    return time.perf_counter() - start_s


async def step_seconds(engine: TorchRolloutEngine, batch: int, prompt: int, new: int) -> float:
    """Return the seconds of one step. What prompts take is left out: the time of one new token is subtracted."""
    await seconds_of(engine, batch, prompt, min(new, 8))
    times = [
        await seconds_of(engine, batch, prompt, new) - await seconds_of(engine, batch, prompt, 1) for _ in range(3)
    ]
    return sorted(times)[1] / (new - 1)


async def measure(place: Place, folder: Path, *, graphs: bool) -> dict[str, float | None]:
    """Return the two batches in static rows."""
    prompt, new = place.pick(8, 128), place.pick(9, 256)
    name = "" if graphs else "_without_graphs"
    engine = await open_engine(place, folder, graphs=graphs)
    peaks = peaks_of(device_name(place.device))
    figures: dict[str, float | None] = {}
    for batch in (1, place.pick(4, 64)):
        step_s = await step_seconds(engine, batch, prompt, new)
        gb_per_s = QWEN3_0_6B.step_bytes(batch * (prompt + new / 2)) / step_s / 1e9
        figures[f"tokens_per_s_batch_{batch}{name}"] = batch / step_s
        if graphs and not place.tiny:
            figures[f"gb_per_s_batch_{batch}"] = gb_per_s
            figures[f"share_of_bandwidth_batch_{batch}"] = share(gb_per_s, peaks.memory_gb_per_s if peaks else None)
    await engine.close()
    return figures


def measure_generate(place: Place, folder: Path) -> dict[str, float | None]:
    """Return the two batches by transformers, which samples too; of fewer new tokens, since it takes long."""
    prompt, new = place.pick(8, 128), place.pick(9, 48)
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(place.name).eval()

    def generate(batch: int, num_new: int) -> None:
        ids = torch.full((batch, prompt), 5, device=place.name)
        model.generate(ids, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=True)

    figures: dict[str, float | None] = {}
    for batch in (1, place.pick(4, 64)):
        taken_s = [place.seconds(partial(generate, batch, num), repeats=2) for num in (new, 1)]
        figures[f"tokens_per_s_batch_{batch}_by_transformers"] = batch * (new - 1) / (taken_s[0] - taken_s[1])
    return figures


def run(place: Place) -> Figures:
    """Make the model and measure."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(Path(temporary) / "model", tiny=place.tiny, device=place.device.torch_device)
        figures: dict[str, float | None] = {}
        measures: list[Callable[[], dict[str, float | None]]] = [
            lambda: asyncio.run(measure(place, folder, graphs=True)),
            lambda: asyncio.run(measure(place, folder, graphs=False)),
            lambda: measure_generate(place, folder),
        ]
        for measured in measures:
            figures |= measured()
            place.note(figures)
    if not place.tiny:
        require_recorded_speed("decoding_speed", device_name(place.device), figures)
    return figures


if __name__ == "__main__":
    main(run)
