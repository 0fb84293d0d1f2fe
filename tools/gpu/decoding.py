"""Samples of the embedded engine beside transformers: log-probabilities, seeds, groups, cut distributions.

In float32 with products in full float32, and in bfloat16, the format that a GPU is used with; in static rows, with
recorded steps (CUDA graphs) and without, and in growing rows.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.piece import Figures, Place, main, require, require_close

from offbeat_core import Completion, GenerateRequest, RolloutEngineConfig, SamplingParams
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import logprob_errors, reference_model, tiny_model

FLOAT32_BOUND = 1e-3
"""Nats: the device and the CPU add up in different orders."""
BFLOAT16_BOUND = 0.1
"""Nats, the mean over tokens."""
GRAPHS, NO_GRAPHS, GROWING = {"static_rows": True}, {"static_rows": True, "graphs": False}, {"static_rows": False}


async def sample(
    folder: Path, place: Place, dtype: str, requests: list[GenerateRequest], options: dict[str, Any]
) -> list[list[Completion]]:
    """Return all requests at once."""
    settings = RolloutEngineConfig(
        model_path=str(folder), device=place.name, dtype=dtype, max_model_len=512, max_running=64, options=options
    )
    engine = await TorchRolloutEngine.create(settings)
    try:
        return list(await asyncio.gather(*map(engine.generate, requests)))
    finally:
        await engine.close()


def make_requests(num: int, num_new: int, **params: Any) -> list[GenerateRequest]:
    """Make prompts of different lengths, four samples of each."""
    rng = np.random.default_rng(0)
    settings = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=7, **params)
    prompts = [rng.integers(3, 300, 5 + 11 * index).astype(np.int32) for index in range(num)]
    return [
        GenerateRequest(request_id=str(index), prompt_ids=prompt, num_samples=4, params=settings)
        for index, prompt in enumerate(prompts)
    ]


def errors_of(folder: Path, requests: list[GenerateRequest], found: list[list[Completion]]) -> "np.ndarray[Any, Any]":
    """Return the error of every token in nats."""
    model = reference_model(folder)
    return np.concatenate(
        [
            logprob_errors(model, request.prompt_ids, completion)
            for request, completions in zip(requests, found, strict=True)
            for completion in completions
        ]
    )


def run(place: Place) -> Figures:
    """Sample and compare."""
    torch.set_float32_matmul_precision("highest")
    requests = make_requests(place.pick(2, 12), place.pick(6, 64))
    with tempfile.TemporaryDirectory() as temporary:
        folder = tiny_model(Path(temporary) / "model", "qwen3", hidden_size=place.pick(64, 512), spread=0.05)
        found, again, unrecorded, growing = (
            asyncio.run(sample(folder, place, "float32", requests, options))
            for options in (GRAPHS, GRAPHS, NO_GRAPHS, GROWING)
        )
        cut = make_requests(2, place.pick(6, 64), top_p=0.9, top_k=50, whole_logprobs=True)
        found_cut = asyncio.run(sample(folder, place, "float32", cut, GRAPHS))
        coarse = asyncio.run(sample(folder, place, "bfloat16", requests, GRAPHS))
        errors = {
            "float32_nats": float(errors_of(folder, requests, found).max()),
            "float32_cut_nats": float(errors_of(folder, cut, found_cut).max()),
            "float32_growing_rows_nats": float(errors_of(folder, requests, growing).max()),
        }
        bfloat16 = float(errors_of(folder, requests, coarse).mean())
    place.note({**errors, "bfloat16_mean_nats": bfloat16})
    for one, other, another in zip(found, again, unrecorded, strict=True):
        ids = [[completion.ids.tolist() for completion in each] for each in (one, other, another)]
        require(ids[0] == ids[1], "the same seeds gave other samples")
        require(ids[0] == ids[2], "recorded steps sample otherwise than steps that are not recorded")
        require(len({tuple(each) for each in ids[0]}) > 1, "all samples of a group are the same")
    for what, error in errors.items():
        require_close(what, error, FLOAT32_BOUND)
    return {**errors, "bfloat16_mean_nats": require_close("bfloat16", bfloat16, BFLOAT16_BOUND)}


if __name__ == "__main__":
    main(run)
