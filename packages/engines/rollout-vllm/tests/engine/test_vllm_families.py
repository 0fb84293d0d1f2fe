"""Tiny models of the families that people train: what the torch trainer has learned reaches a running vLLM."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from engine_checks import DEADLINE_S, config_of, request, started
from gpt_oss_folders import write_mxfp4
from image_checks import SIZES
from tiny_families import write_tiny_family
from transformers import AutoProcessor

from offbeat_core import TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_tokenizer, tiny_vision_model
from offbeat_weightsync import InProcessStream

PROMPT = np.asarray([10, 44, 81, 7, 100, 31], np.int32)
WIDE = {"vocab_size": 320, "hidden_size": 128, "head_dim": 32, "v_head_dim": 32}
"""vLLM's attention on a CPU takes no heads narrower than 32."""
GROUPED = {"num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
IN_FLOAT32, IN_BFLOAT16 = ("float32", 1e-3), ("bfloat16", 0.3)
"""Number format of the engine, and how far apart log-probabilities may be, nats."""
FAMILIES = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen2", "llama", "gpt_oss", "gemma3_text"), (WIDE, IN_FLOAT32)),
    **dict.fromkeys(("gemma4_text", "mistral", "glm4_moe", "olmo3", "phi3", "qwen2_moe"), (WIDE, IN_FLOAT32)),
    "deepseek_v3": (WIDE | GROUPED | LATENT, IN_FLOAT32),
    # vLLM computes the gated delta rule on a CPU in bfloat16 alone.
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"), (WIDE, IN_BFLOAT16)),
}


async def sample(engine, trainer, version, prompt, images):
    """Return what the engine samples, and how far its log-probabilities are from the trainer's, nats."""
    completions = await engine.generate(replace(request(prompt=prompt, num_samples=2), images=images))
    for completion in completions:
        assert {segment.version for segment in completion.segments} == {version}
    whole = [np.concatenate([prompt, completion.ids]).astype(np.int32) for completion in completions]
    is_sampled = np.arange(len(whole[0])) >= len(prompt)
    sequences = [TrainSequence(ids=ids, loss_mask=is_sampled, images=images) for ids in whole]
    found = trainer.logprobs(sequences)
    pairs = zip(completions, found, strict=True)
    return sequences, max(np.abs(one.logprobs - logprobs[len(prompt) :]).max() for one, logprobs in pairs)


IN_ITS_OWN_PROCESS = {"options": {"form": "async"}}
"""vLLM serves OLMo 3 by transformers' own classes, and changes them for all of the process, the trainer too."""


async def train_and_serve(engine, trainer, dtype, tolerance, prompt, images):
    for version in range(3):
        sequences, error = await sample(engine, trainer, version, prompt, images)
        assert error < tolerance
        if version < 2:
            trainer.forward_backward(sequences, lambda tokens: (-tokens.logprobs_N.mean(), {}))
            trainer.step()
            named = [(name, tensor.detach().clone()) for name, tensor in trainer.weights()]
            stream = InProcessStream(named, version + 1, dtype=dtype, keep=trainer.float32_weights)
            await engine.update_weights(stream, version + 1)


async def start_and_serve(folder, dtype, tolerance, prompt=PROMPT, images=(), **settings):
    trainer = TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu", learning_rate=1e-2))
    async with started(config_of(folder, max_running=4, max_model_len=256, dtype=dtype, **settings)) as engine:
        await train_and_serve(engine, trainer, dtype, tolerance, prompt, images)


@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_torch_trainer_has_learned_is_served(family, tmp_path):
    sizes, (dtype, tolerance) = FAMILIES[family]
    write_tiny_family(family, tmp_path, **sizes)
    tiny_tokenizer(tmp_path)
    settings = IN_ITS_OWN_PROCESS if family == "olmo3" else {}
    asyncio.run(start_and_serve(tmp_path, dtype, tolerance, **settings))


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_experts_in_mxfp4_are_served_decoded_and_updated(num_ranks, tmp_path):
    # vLLM clamps at 7, as all published models do, whatever the config says.
    write_mxfp4(tmp_path, head_dim=32, intermediate_size=64, swiglu_limit=7.0)
    tiny_tokenizer(tmp_path)
    asyncio.run(start_and_serve(tmp_path, *IN_FLOAT32, tensor_parallel=num_ranks))


def pictured(folder):
    """Return a prompt with images of two sizes, as the model's own processor writes it."""
    processor, draw = AutoProcessor.from_pretrained(folder), np.random.default_rng(3)
    images = tuple(draw.integers(0, 256, (*size, 3), np.uint8) for size in SIZES[:2])
    text = f"look {processor.image_token} and {processor.image_token} say:"
    encoded = processor(text=[text], images=[list(images)], input_data_format="channels_last", return_tensors="np")
    return {"prompt": encoded["input_ids"][0].astype(np.int32), "images": images}


@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE_S)
def test_gemma4_is_served_with_images_where_its_attention_is_causal(tmp_path):
    """Tokens of an image see each other in its larger models alone, which vLLM's CPU build does not compute."""
    folder = tiny_vision_model(tmp_path / "model", "gemma4", text={"use_bidirectional_attention": None})
    asyncio.run(start_and_serve(folder, *IN_FLOAT32, **pictured(folder)))
