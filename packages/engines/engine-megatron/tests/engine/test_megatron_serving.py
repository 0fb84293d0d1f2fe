"""What LoRA sends is what the embedded rollout engine serves, merged here or there."""

import asyncio

import numpy as np
import pytest
from megatron_layouts import Layout
from megatron_yardstick import train_steps

from offbeat_core import GenerateRequest, RolloutEngineConfig, SamplingParams, TrainSequence
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_testing import reference_model
from offbeat_weightsync import InProcessStream, merge_adapter, select_adapter

PROMPT = np.array([1, 264, 17, 33], np.int32)


async def sample(folder, tensors):
    """Ids and log-probabilities of one completion of an engine that was given these weights."""
    engine = await TorchRolloutEngine.create(
        RolloutEngineConfig(model_path=str(folder), device="cpu", dtype="float32", max_model_len=64, max_running=1)
    )
    try:
        await engine.update_weights(InProcessStream(tensors, 1), 1)
        params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
        [found] = await engine.generate(GenerateRequest(request_id="r", prompt_ids=PROMPT, params=params))
    finally:
        await engine.close()
    return {"ids": found.ids.tolist(), "logprobs": found.logprobs.tolist()}


@pytest.mark.timeout(180)
@pytest.mark.mesh(tp=2, deadline_s=120, compare=False)
@pytest.mark.parametrize("merged", ["by the trainer", "by the receiver"])
def test_the_embedded_engine_samples_from_the_adapted_policy(create, mesh, model_folder, merged):
    engine = create(Layout(lora=True), mesh)
    train_steps(engine, 0, 3)
    if merged == "by the trainer":
        tensors = [(name, tensor.clone()) for name, tensor in engine.weights()]
    else:
        base = dict(reference_model(model_folder).named_parameters())
        adapter = select_adapter((name, tensor.clone()) for name, tensor in engine.weights(part="adapter"))
        tensors = list((base | dict(merge_adapter(base.__getitem__, adapter, scale=2.0))).items())
    answer = mesh.group("tp").decide(lambda: asyncio.run(sample(model_folder, tensors)))
    ids = np.concatenate([PROMPT, np.array(answer["ids"], np.int32)])
    sequence = TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(PROMPT))
    [now], [before] = engine.logprobs([sequence]), engine.logprobs([sequence], reference=True)
    np.testing.assert_allclose(answer["logprobs"], now[len(PROMPT) :], atol=1e-3)
    assert np.abs(now - before).max() > 1e-2
