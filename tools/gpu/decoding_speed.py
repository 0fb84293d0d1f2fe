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

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import tiny_model

BFLOAT16_BYTES = 2
LAYERS, KV_HEADS, HEAD_SIZE, HIDDEN, WIDTH, VOCABULARY = 28, 8, 128, 1024, 3072, 151936
"""Of Qwen3-0.6B, with 16 query heads and a tied embedding."""
QUERY_HEADS = 16


def make_model(folder: Path, *, tiny: bool) -> Path:
    """Make a model of Qwen3-0.6B's shape with random weights; in a test of a tiny one's."""
    if tiny:
        return tiny_model(folder, "qwen3")
    widths = {"intermediate_size": WIDTH, "head_dim": HEAD_SIZE, "max_position_embeddings": 40960}
    heads: dict[str, Any] = {"num_heads": QUERY_HEADS, "num_kv_heads": KV_HEADS, "num_layers": LAYERS}
    return tiny_model(folder, "qwen3", vocab_size=VOCABULARY, hidden_size=HIDDEN, **heads, spread=0.02, config=widths)


def num_parameters() -> int:
    """Count the parameters of that shape. A decoding step reads all of them: the tied embedding is its head."""
    attention = HIDDEN * HEAD_SIZE * (2 * QUERY_HEADS + 2 * KV_HEADS)
    return LAYERS * (attention + 3 * HIDDEN * WIDTH) + HIDDEN * VOCABULARY


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


async def measure(place: Place, folder: Path, *, graphs: bool) -> dict[str, float | None]:
    """Return the two batches in static rows. What prompts take is left out: the time of one new token is subtracted."""
    prompt, new = place.pick(8, 128), place.pick(9, 256)
    name = "" if graphs else "_without_graphs"
    settings = RolloutEngineConfig(
        model_path=str(folder),
        device=place.name,
        dtype="bfloat16",
        max_model_len=place.pick(64, 512),
        max_running=64,
        options={"static_rows": True, "graphs": graphs},
    )
    engine = await TorchRolloutEngine.create(settings)
    peaks = peaks_of(device_name(place.device))
    figures: dict[str, float | None] = {}
    for batch in (1, place.pick(4, 64)):
        await seconds_of(engine, batch, prompt, 8)
        times = [
            await seconds_of(engine, batch, prompt, new) - await seconds_of(engine, batch, prompt, 1) for _ in range(3)
        ]
        step_s = sorted(times)[1] / (new - 1)
        cached = batch * (prompt + new / 2) * 2 * LAYERS * KV_HEADS * HEAD_SIZE
        gb_per_s = BFLOAT16_BYTES * (num_parameters() + cached) / step_s / 1e9
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
        folder = make_model(Path(temporary) / "model", tiny=place.tiny)
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
