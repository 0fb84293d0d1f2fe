"""Kernels of one decoding step of the embedded engine at batch 1 and 64: Qwen3-0.6B's shape, and Qwen3-8B's.

Random weights, bfloat16, prompts of 128 tokens, recorded steps. Of the 8B shape two models of 4 and 8 of its 36 layers
are timed; the time of a layer is their difference, so that the head, which is a third of the smaller one, counts once.
It passes with 1,200 and 48,000 tokens a second of the first, and 65 % of the bandwidth at batch 1 of the second.
"""

import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.decoding_speed import open_engine, seconds_of, step_seconds
from gpu.kernels import recorded
from gpu.piece import Figures, Place, device_name, main, peaks_of, reach, share
from gpu.shapes import QWEN3_0_6B, QWEN3_8B, TINY, Shape, make_model

FEW_LAYERS, MORE_LAYERS = 4, 8
STEPS = 16
"""Steps under the profiler: what a batch of one token runs is taken from what one of `STEPS` + 1 runs."""
GOALS = {
    "tokens_per_s_batch_1, 0.6B": 1_200.0,
    "tokens_per_s_batch_64, 0.6B": 48_000.0,
    "share_of_bandwidth_batch_1, 8B shape": 0.65,
}


async def time_steps(place: Place, folder: Path, of: str, *, profile: bool = True) -> dict[int, float]:
    """Return the seconds of a step by the batch, and note its kernels."""
    prompt, new = place.pick(8, 128), place.pick(6, 192)
    engine, found = await open_engine(place, folder), dict[int, float]()
    for batch in (1, place.pick(4, 64)):
        found[batch] = await step_seconds(engine, batch, prompt, new)
        if profile:
            num = place.pick(4, STEPS)
            with recorded(place) as more:
                await seconds_of(engine, batch, prompt, num + 1)
            with recorded(place) as one:
                await seconds_of(engine, batch, prompt, 1)
            place.note(more.beyond(one, num).figures(f"{of} batch {batch}", found[batch]))
    await engine.close()
    place.device.release_unused()
    return found


def speeds(place: Place, shape: Shape, step_s: dict[int, float], of: str) -> dict[str, Any]:
    """Return tokens a second and the share of the bandwidth."""
    peaks = peaks_of(device_name(place.device))
    found: dict[str, Any] = {}
    for batch, seconds in step_s.items():
        gb_per_s = shape.step_bytes(batch * (place.pick(8, 128) + place.pick(6, 192) / 2)) / seconds / 1e9
        found |= {
            f"tokens_per_s_batch_{batch}, {of}": batch / seconds,
            f"share_of_bandwidth_batch_{batch}, {of}": share(gb_per_s, peaks.memory_gb_per_s if peaks else None),
        }
    place.note(found)
    return found


def run(place: Place) -> Figures:
    """Measure both shapes."""
    with tempfile.TemporaryDirectory() as temporary:

        def step_s(shape: Shape, of: str, *, profile: bool = True) -> dict[int, float]:
            place_of = Path(temporary) / f"{shape.hidden_size}-{shape.num_layers}"
            folder = make_model(place_of, shape, tiny=place.tiny, device=place.device.torch_device)
            return asyncio.run(time_steps(place, folder, of, profile=profile))

        small = TINY if place.tiny else QWEN3_0_6B
        figures = speeds(place, small, step_s(QWEN3_0_6B, "0.6B"), "0.6B")
        more = step_s(replace(QWEN3_8B, num_layers=MORE_LAYERS), f"{MORE_LAYERS} layers of 8B")
        few = step_s(replace(QWEN3_8B, num_layers=FEW_LAYERS), "", profile=False)
    layer_s = {batch: (more[batch] - few[batch]) / (MORE_LAYERS - FEW_LAYERS) for batch in more}
    whole = {batch: more[batch] + (QWEN3_8B.num_layers - MORE_LAYERS) * layer_s[batch] for batch in more}
    figures |= speeds(place, QWEN3_8B, whole, "8B shape")
    return reach(place, figures, GOALS)


if __name__ == "__main__":
    main(run)
