"""With FP8 weights the engine computes what transformers computes from the dequantised ones, and proves the blocks."""

import numpy as np
import pytest
import torch

from offbeat_core import GenerateRequest, SamplingParams, WeightSyncError
from offbeat_testing import FakeWeightStream, changed_weights, logprob_errors, reference_model, tiny_model
from offbeat_weightsync import (
    DequantizedStream,
    InProcessStream,
    quantize_tensors,
)

pytestmark = pytest.mark.asyncio
REQUEST = GenerateRequest(
    request_id="r",
    prompt_ids=np.arange(5, 25, dtype=np.int32),
    num_samples=2,
    params=SamplingParams(max_tokens=40, ignore_eos=True, seed=3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("fp8") / "model", hidden_size=192)  # matrices of more than a block


def check(model, named, completions):
    """Exact for the dequantised weights, and visibly not for those they were made from."""
    named = [(name, tensor.detach().clone()) for name, tensor in named]
    values = DequantizedStream(InProcessStream(quantize_tensors(named), 0))
    model.load_state_dict(dict(values), strict=False)
    assert max(logprob_errors(model, REQUEST.prompt_ids, each).max() for each in completions) < 1e-3
    model.load_state_dict(dict(named), strict=False)
    worst = max(logprob_errors(model, REQUEST.prompt_ids, each).max() for each in completions)
    assert worst > 3e-3, "nothing was rounded"


async def test_logprobs_are_those_of_the_dequantised_weights(folder, open_engine):
    first, second = reference_model(folder), changed_weights(reference_model(folder))
    second = [(name, torch.as_tensor(tensor)) for name, tensor in second]

    async with open_engine(folder, max_model_len=128, weight_format="fp8") as engine:
        loaded = await engine.generate(REQUEST)
        stream = FakeWeightStream(list(quantize_tensors(second)), 4)
        proof = await engine.update_weights(stream, 4)
        updated = await engine.generate(REQUEST)
    named = list(first.named_parameters())
    check(reference_model(folder), named, loaded)
    check(reference_model(folder), second, updated)
    assert proof == stream.expected()
    assert proof.num_tensors > len(named), "no scales were sent"
    assert updated[0].oldest_version == 4


async def test_an_update_without_scales_leaves_nothing_served(folder, open_engine):
    weights = list(quantize_tensors(reference_model(folder).named_parameters()))
    broken = [pair for pair in weights if not pair[0].endswith("down_proj.weight_scale_inv")]

    async with open_engine(folder, max_model_len=128, weight_format="fp8") as engine:
        with pytest.raises(WeightSyncError, match="must be followed by"):
            await engine.update_weights(InProcessStream(broken, 1), 1)
        with pytest.raises(WeightSyncError, match="no usable weights"):
            await engine.generate(REQUEST)
        await engine.update_weights(InProcessStream(weights, 2), 2)
        assert (await engine.generate(REQUEST))[0].oldest_version == 2
