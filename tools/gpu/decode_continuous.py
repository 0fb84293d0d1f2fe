"""256 requests of mixed lengths over 64 rows, beside 64 that start and end together.

Qwen3-0.6B's shape with random weights, bfloat16; prompts of 32 to 224 tokens, 128 to 384 new ones, 256 in the mean.
Its speed counts everything: prompts, admissions, and the last rows, which run beside empty ones. It passes with 75 % of
the speed of the batch that starts together.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from gpu.decoding_speed import open_engine
from gpu.piece import Figures, Place, main, reach
from gpu.shapes import make_model

from offbeat_core import GenerateRequest, SamplingParams
from offbeat_rollout_torch import TorchRolloutEngine

ROWS, REQUESTS = 64, 256
GOALS = {"continuous_share": 0.75}


def make_requests(prompts: Sequence[int], new: Sequence[int]) -> list[GenerateRequest]:
    """Make requests of these lengths, of random tokens."""
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_ids=rng.integers(3, 300, prompt).astype(np.int32),
            params=SamplingParams(max_tokens=num, ignore_eos=True, seed=index),
        )
        for index, (prompt, num) in enumerate(zip(prompts, new, strict=True))
    ]


async def tokens_per_s(engine: TorchRolloutEngine, requests: Sequence[GenerateRequest]) -> float:
    """Return the tokens sampled, over the time until the last request has ended."""
    start_s = time.perf_counter()
    await asyncio.gather(*map(engine.generate, requests))
    return sum(request.params.max_tokens for request in requests) / (time.perf_counter() - start_s)


async def measure(place: Place, folder: Path) -> dict[str, float]:
    """Return both speeds, each the second time: the first one records the steps."""
    rng, rows = np.random.default_rng(1), place.pick(4, ROWS)
    num, prompt, new = place.pick(8, REQUESTS), place.pick(8, 128), place.pick(8, 256)
    lengths = [
        rng.integers(mean - spread, mean + spread, num, endpoint=True).tolist()
        for mean, spread in ((prompt, 3 * prompt // 4), (new, new // 2))
    ]
    kinds = {"together": make_requests([prompt] * rows, [new] * rows), "continuous": make_requests(*lengths)}
    engine = await open_engine(place, folder)
    found: dict[str, float] = {}
    for kind, requests in kinds.items():
        for _ in range(place.pick(1, 2)):
            found[f"tokens_per_s_{kind}"] = await tokens_per_s(engine, requests)
        place.note(found)
    await engine.close()
    return {**found, "continuous_share": found["tokens_per_s_continuous"] / found["tokens_per_s_together"]}


def run(place: Place) -> Figures:
    """Make the model and measure."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_model(Path(temporary) / "model", tiny=place.tiny, device=place.device.torch_device)
        figures = asyncio.run(measure(place, folder))
    place.note(figures)
    return reach(place, figures, GOALS)


if __name__ == "__main__":
    main(run)
