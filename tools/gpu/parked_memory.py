"""Memory that trainer and engine give back, and take again with the same values.

A trainer that has slept at level 2 and woken up holds the same weights bit for bit, and takes the same next two steps
as one that has not; the second step depends on Adam's moments. The embedded engine samples the same tokens. On a CPU
steps are alike to the bit; on a GPU additions of gradients have no fixed order.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.piece import Figures, Place, main, require, require_close
from gpu.trainer_against_cpu import make_sequences, policy_gradient, relative

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import FakeWeightStream, reference_model, tiny_model

STEP_BOUND = 1e-5
"""Bound of losses and gradient norms relative to themselves, on an accelerator."""
LEFT_SHARE = 0.1
"""Share of the memory that may be held while asleep: indices, workspaces of libraries."""
FLOAT32_BYTES = 4


def step_after(engine: TorchTrainEngine, num_tokens: int) -> tuple[float, float]:
    """Return loss and gradient norm of one step."""
    loss = engine.forward_backward(make_sequences(2, 4, num_tokens), policy_gradient)["loss"].value
    return loss, engine.step()["grad_norm"].value


def park_trainer(place: Place, folder: Path) -> dict[str, float]:
    """Sleep and wake between two steps, beside an engine that stays awake."""
    config = TrainEngineConfig(model_path=str(folder), device=place.name, learning_rate=1e-3)
    num_tokens = place.pick(8, 64)
    steady = TorchTrainEngine.create(config)
    wanted = [step_after(steady, num_tokens) for _ in range(3)]
    steady.close()
    del steady
    place.device.release_unused()
    engine = TorchTrainEngine.create(config)
    found = [step_after(engine, num_tokens)]
    before = {name: tensor.cpu().clone() for name, tensor in engine.weights()}
    place.device.release_unused()
    awake = place.device.memory().allocated_bytes
    start_s = time.perf_counter()
    engine.sleep(2)
    parked_s = time.perf_counter() - start_s
    asleep = place.device.memory().allocated_bytes
    start_s = time.perf_counter()
    engine.wake()
    place.device.synchronize()
    woken_s = time.perf_counter() - start_s
    same = all(torch.equal(tensor.cpu(), before[name]) for name, tensor in engine.weights())
    found += [step_after(engine, num_tokens) for _ in range(2)]
    engine.close()
    error = max(relative(list(one), list(other)) for one, other in zip(found, wanted, strict=True))
    figures = {
        "trainer_step_error": error,
        "trainer_freed_gib": (awake - asleep) / 2**30,
        "trainer_parked_s": parked_s,
        "trainer_woken_s": woken_s,
    }
    place.note(figures)
    require(same, "the weights are others after waking")
    require_close("steps after waking", error, STEP_BOUND if place.is_accelerator else 0.0)
    if place.is_accelerator:
        require(asleep < LEFT_SHARE * awake, f"{asleep} of {awake} bytes are still held asleep")
    return figures


def check_freed(weights: int, awake: int, asleep: Sequence[int]) -> None:
    """Check what an engine holds asleep: at level 1 its weights, at level 2 next to nothing.

    Args:
        weights: bytes of the model in the engine's format.
        awake: bytes that the engine holds awake: weights, keys and values, recorded steps.
        asleep: bytes that it holds asleep at levels 1 and 2.
    """
    beside = awake - weights
    require(beside > 0, f"the engine holds {awake} bytes awake, its weights alone are {weights}")
    left = asleep[0] - weights
    require(left <= LEFT_SHARE * beside, f"at level 1 {left} of {beside} bytes are held beside the weights")
    require(asleep[1] <= LEFT_SHARE * awake, f"at level 2 {asleep[1]} of {awake} bytes are still held")


async def park_engine(place: Place, folder: Path) -> None:
    """Sleep at both levels between samples; after level 2 whole new weights come."""
    before_engine = place.device.memory().allocated_bytes
    engine = await TorchRolloutEngine.create(
        RolloutEngineConfig(model_path=str(folder), device=place.name, max_model_len=256, max_running=32)
    )
    params = SamplingParams(max_tokens=place.pick(6, 64), ignore_eos=True, seed=3)
    request = GenerateRequest(request_id="r", prompt_ids=np.arange(5, 25, dtype=np.int32), num_samples=8, params=params)
    before = await engine.generate(request)
    awake, asleep = 0, list[int]()
    for level in (1, 2):
        await engine.pause("wait")
        awake = place.device.memory().allocated_bytes - before_engine
        await engine.sleep(level)
        asleep.append(place.device.memory().allocated_bytes - before_engine)
        place.note({f"engine_level_{level}_freed_gib": (awake - asleep[-1]) / 2**30})
        await engine.wake()
        if level == 2:
            weights = list(reference_model(folder).named_parameters())
            await engine.update_weights(FakeWeightStream(weights, 1), 1)
        await engine.resume()
        after = await engine.generate(request)
        same = all(np.array_equal(a.ids, b.ids) for a, b in zip(before, after, strict=True))
        require(same, f"other samples after level {level}")
    await engine.close()
    if place.is_accelerator:
        num_weights = sum(each.numel() for each in reference_model(folder).parameters())
        check_freed(FLOAT32_BYTES * num_weights, awake, asleep)


def run(place: Place) -> Figures:
    """Return the trainer, then the engine."""
    with tempfile.TemporaryDirectory() as temporary:
        shape: dict[str, Any] = {"hidden_size": place.pick(64, 2048), "num_layers": place.pick(2, 8)}
        folder = tiny_model(Path(temporary) / "model", "qwen3", **shape)
        trainer = park_trainer(place, folder)
        place.device.release_unused()
        asyncio.run(park_engine(place, folder))
        return trainer


if __name__ == "__main__":
    main(run)
