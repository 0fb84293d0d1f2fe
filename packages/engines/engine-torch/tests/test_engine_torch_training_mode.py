"""Dropout and router jitter of a config.json are never computed, with activation checkpointing neither."""

import numpy as np
import pytest
import torch
import transformers

from offbeat_core import ConfigError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import reference_logprobs, reference_model

IDS = dict.fromkeys(("bos_token_id", "eos_token_id"), 1) | {"pad_token_id": None}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, **IDS}
GATED = {**LAYERS, "intermediate_size": 64, "num_key_value_heads": 2}
NOISY = {
    "opt": transformers.OPTConfig(
        **LAYERS, ffn_dim=64, word_embed_proj_dim=32, dropout=0.3, layerdrop=0.5, max_position_embeddings=64
    ),
    "biogpt": transformers.BioGptConfig(
        **LAYERS, intermediate_size=64, hidden_dropout_prob=0.3, layerdrop=0.5, max_position_embeddings=64
    ),
    "starcoder2": transformers.Starcoder2Config(**GATED, residual_dropout=0.3, embedding_dropout=0.3),
    "mixtral": transformers.MixtralConfig(**GATED, num_local_experts=4, router_jitter_noise=0.3),
    "gpt_neox": transformers.GPTNeoXConfig(**LAYERS, intermediate_size=64, hidden_dropout=0.3, attention_dropout=0.3),
}
"""Families whose configuration asks for something random in training mode: functions, modules, and the router."""


@pytest.fixture(scope="module", params=NOISY)
def noisy_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(NOISY[request.param])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder


def create(folder, **changes):
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu", **changes))


def loss_logprobs(engine, sequences):
    """Return what `forward_backward` gives its loss, in the order of the micro-batch."""
    seen = []

    def loss(tokens):
        seen.append(tokens.logprobs_N.detach().numpy().copy())
        return -tokens.logprobs_N.sum(), {}

    engine.forward_backward(sequences, loss)
    return np.concatenate(seen)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}], ids=["all weights", "lora"])
def test_checkpointing_leaves_the_policy_that_transformers_computes(noisy_folder, make_groups, changes):
    sequences = make_groups(num_prompts=2)
    engine = create(noisy_folder, activation_checkpointing=True, **changes)
    model = reference_model(noisy_folder)
    wanted = [reference_logprobs(model, each.ids) * each.loss_mask for each in sequences]
    for reference in (False, False, True):
        for found, right in zip(engine.logprobs(sequences, reference=reference), wanted, strict=True):
            np.testing.assert_allclose(found, right, atol=1e-4)
    first, second = loss_logprobs(engine, sequences), loss_logprobs(engine, sequences)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, loss_logprobs(create(noisy_folder, **changes), sequences))
    assert not any(module.training for module in engine._policy.model.whole.modules())


def test_a_layer_is_computed_again_in_the_backward_pass(noisy_folder, make_groups):
    engine, calls = create(noisy_folder, activation_checkpointing=True), []
    attention = next(m for m in engine._policy.model.decoder.modules() if type(m).__name__.endswith("Attention"))
    attention.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    engine.logprobs(make_groups(num_prompts=1))
    assert calls == [False]
    loss_logprobs(engine, make_groups(num_prompts=1))
    assert calls == [False, True, True]


def test_layers_that_cannot_be_computed_again_are_refused_by_the_setting(tmp_path):
    """CTRL writes its layers down without transformers' base class for them."""
    config = transformers.CTRLConfig(vocab_size=300, n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=64, **IDS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    create(tmp_path)
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        create(tmp_path, activation_checkpointing=True)
