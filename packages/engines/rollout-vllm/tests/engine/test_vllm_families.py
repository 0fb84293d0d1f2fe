"""Tiny models of the families that people train: what the torch trainer has learned reaches a running vLLM."""

import asyncio

import numpy as np
import pytest
from engine_checks import DEADLINE_S, config_of, request, started
from gpt_oss_folders import write_mxfp4
from tiny_families import write_tiny_family

from offbeat_core import TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_tokenizer
from offbeat_weightsync import InProcessStream

PROMPT = np.asarray([10, 44, 81, 7, 100, 31], np.int32)
WIDE = {"vocab_size": 320, "hidden_size": 128, "head_dim": 32, "v_head_dim": 32}
"""vLLM's attention on a CPU takes no heads narrower than 32."""
IN_FLOAT32, IN_BFLOAT16 = ("float32", 1e-3), ("bfloat16", 0.3)
"""Number format of the engine, and how far apart log-probabilities may be, nats."""
FAMILIES = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen2", "llama", "gpt_oss", "gemma3_text"), (WIDE, IN_FLOAT32)),
    **dict.fromkeys(("gemma4_text", "mistral", "glm4_moe", "olmo3", "phi3", "qwen2_moe"), (WIDE, IN_FLOAT32)),
    # vLLM computes the gated delta rule on a CPU in bfloat16 alone.
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"), (WIDE, IN_BFLOAT16)),
}


def sequence_of(completion):
    ids = np.concatenate([PROMPT, completion.ids]).astype(np.int32)
    return TrainSequence(ids=ids, loss_mask=np.arange(len(ids)) >= len(PROMPT))


async def check_served(engine, trainer, version, tolerance):
    """Compare the log-probabilities of what the engine samples with the trainer's."""
    completions = await engine.generate(request(prompt=PROMPT, num_samples=2))
    for completion in completions:
        assert {segment.version for segment in completion.segments} == {version}
    sequences = [sequence_of(completion) for completion in completions]
    for completion, found in zip(completions, trainer.logprobs(sequences), strict=True):
        np.testing.assert_allclose(completion.logprobs, found[len(PROMPT) :], atol=tolerance, rtol=0)
    return sequences


IN_ITS_OWN_PROCESS = {"options": {"form": "async"}}
"""vLLM serves OLMo 3 by transformers' own classes, and changes them for all of the process, the trainer too."""


async def train_and_serve(folder, dtype, tolerance, **settings):
    trainer = TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu", learning_rate=1e-2))
    async with started(config_of(folder, max_running=4, max_model_len=256, dtype=dtype, **settings)) as engine:
        for version in range(2):
            sequences = await check_served(engine, trainer, version, tolerance)
            trainer.forward_backward(sequences, lambda tokens: (-tokens.logprobs_N.mean(), {}))
            trainer.step()
            named = [(name, tensor.detach().clone()) for name, tensor in trainer.weights()]
            stream = InProcessStream(named, version + 1, dtype=dtype, keep=trainer.float32_weights)
            await engine.update_weights(stream, version + 1)
        await check_served(engine, trainer, 2, tolerance)


@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_torch_trainer_has_learned_is_served(family, tmp_path):
    sizes, (dtype, tolerance) = FAMILIES[family]
    write_tiny_family(family, tmp_path, **sizes)
    tiny_tokenizer(tmp_path)
    settings = IN_ITS_OWN_PROCESS if family == "olmo3" else {}
    asyncio.run(train_and_serve(tmp_path, dtype, tolerance, **settings))


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_experts_in_mxfp4_are_served_decoded_and_updated(num_ranks, tmp_path):
    # vLLM clamps at 7, as all published models do, whatever the config says.
    write_mxfp4(tmp_path, head_dim=32, intermediate_size=64, swiglu_limit=7.0)
    tiny_tokenizer(tmp_path)
    asyncio.run(train_and_serve(tmp_path, *IN_FLOAT32, tensor_parallel=num_ranks))
