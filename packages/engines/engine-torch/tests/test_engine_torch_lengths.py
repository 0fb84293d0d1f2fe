"""Thresholds of a configuration in tokens: windows, chunks, rotary frequencies that depend on the whole call."""

import json

import numpy as np
import pytest
import torch
import transformers

from offbeat_core import ModelError, TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_engine_torch._lengths import find_thresholds
from offbeat_testing import reference_logprobs, reference_model

ORIGINAL, LONGEST = 32, 128
SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": ORIGINAL}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.2}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "llama_4_scaling_beta": 0.5}
LIMITED = {
    "phi3 longrope": (
        transformers.Phi3Config(**SMALL, original_max_position_embeddings=ORIGINAL, **rope("longrope", **FACTORS)),
        "rope_type 'longrope'.*original_max_position_embeddings = 32",
    ),
    "llama longrope": (
        transformers.LlamaConfig(**SMALL, **rope("longrope", factor=4.0, **FACTORS)),
        "rope_type 'longrope'",
    ),
    "phimoe longrope": (
        transformers.PhimoeConfig(**SMALL, num_local_experts=4, **rope("longrope", **FACTORS, **MSCALES)),
        "rope_type 'longrope'",
    ),
    "llama dynamic": (
        transformers.LlamaConfig(**SMALL | {"max_position_embeddings": ORIGINAL}, **rope("dynamic", factor=4.0)),
        "rope_type 'dynamic'.*max_position_embeddings = 32",
    ),
    "phimoe window": (
        transformers.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=ORIGINAL),
        "beyond sliding_window = 32",
    ),
    "phimoe window before longrope": (
        transformers.PhimoeConfig(
            **SMALL,
            num_local_experts=4,
            sliding_window=ORIGINAL,
            **rope("longrope", **FACTORS | {"original_max_position_embeddings": 2 * ORIGINAL}, **MSCALES),
        ),
        "beyond sliding_window = 32",
    ),
    "phimoe longrope before window": (
        transformers.PhimoeConfig(
            **SMALL, num_local_experts=4, sliding_window=2 * ORIGINAL, **rope("longrope", **FACTORS, **MSCALES)
        ),
        "rope_type 'longrope'",
    ),
}
"""Settings that limit what can be trained, and what is said of a longer sequence."""
FREE = {
    "mistral window": transformers.MistralConfig(**SMALL, sliding_window=ORIGINAL),
    "gemma3 window": transformers.Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=ORIGINAL, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2 window of the last layer": transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=ORIGINAL, max_window_layers=1
    ),
    "ministral3 scale by position": transformers.Ministral3Config(**SMALL, head_dim=8, **rope("yarn", **YARN)),
    "llama3": transformers.LlamaConfig(
        **SMALL,
        **rope(
            "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
        ),
    ),
}
"""Settings that the engine computes at every length."""


def write(config, folder):
    """A random model whose weights are large enough for what is masked to show."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.mul_(5.0)
    model.save_pretrained(folder)
    return folder


def create(folder, **changes):
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), device="cpu", **changes))


def sequence(length, seed=0):
    ids = np.random.default_rng(seed).integers(3, 300, length).astype(np.int32)
    return TrainSequence(ids=ids, loss_mask=np.arange(length) > 0)


def assert_as_transformers(engine, folder, sequences):
    model = reference_model(folder)
    for _ in range(2):
        for found, each in zip(engine.logprobs(sequences), sequences, strict=True):
            np.testing.assert_allclose(found, reference_logprobs(model, each.ids), atol=1e-4)


def loss(tokens):
    return -tokens.logprobs_N.sum(), {}


@pytest.mark.parametrize("name", LIMITED)
def test_a_sequence_beyond_a_limit_is_refused_in_one_line_and_below_it_trained(name, tmp_path, caplog):
    config, message = LIMITED[name]
    folder = write(config, tmp_path)
    engine = create(folder)
    assert "sequences of more than 32 tokens will be refused" in caplog.text
    assert_as_transformers(engine, folder, [sequence(ORIGINAL), sequence(20, seed=1), sequence(9, seed=2)])
    for ask in (engine.logprobs, lambda each: engine.forward_backward(each, loss)):
        with pytest.raises(ModelError, match=f"longer than 32 tokens: got 33; .*{message}") as raised:
            ask([sequence(20), sequence(ORIGINAL + 1)])
        assert "\n" not in str(raised.value)
    assert_as_transformers(engine, folder, [sequence(ORIGINAL)])  # the check has left nothing behind


@pytest.mark.parametrize("name", FREE)
def test_what_the_engine_computes_has_no_limit(name, tmp_path):
    folder = write(FREE[name], tmp_path)
    engine = create(folder)
    lengths = (3 * ORIGINAL, 20, ORIGINAL + 1)
    assert_as_transformers(engine, folder, [sequence(length, seed=length) for length in lengths])


def test_the_first_policy_is_limited_alike(tmp_path):
    folder = write(LIMITED["phimoe window"][0], tmp_path)
    with pytest.raises(ModelError, match="sliding_window = 32"):
        create(folder).logprobs([sequence(ORIGINAL + 1)], reference=True)


def test_the_check_leaves_the_configuration_as_it_was(tmp_path):
    folder = write(LIMITED["phimoe window"][0], tmp_path)
    create(folder).save_weights(tmp_path / "saved")
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "saved"))
    assert before["sliding_window"] == after["sliding_window"] == ORIGINAL


@pytest.mark.parametrize("windows", [(64, 32), (32, 64)], ids=str)
def test_where_layers_differ_in_a_threshold_the_lowest_counts(windows):
    decoder = torch.nn.Sequential(*(torch.nn.Identity() for _ in windows))
    for layer, window in zip(decoder, windows, strict=True):
        layer.sliding_window = window
    assert find_thresholds(decoder, transformers.LlamaConfig(**SMALL)) == {"sliding_window": 32}


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_limit_a_family_together(mesh, tmp_path):
    if mesh.rank == 0:
        write(LIMITED["phimoe window"][0], tmp_path)
    mesh.group("dp").barrier()
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(tmp_path), device="cpu"), mesh)
    engine.logprobs([sequence(ORIGINAL), sequence(9)])
    with pytest.raises(ModelError, match="sliding_window = 32"):
        engine.logprobs([sequence(ORIGINAL + 1), sequence(9)])


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 16}, {"keep_window_size": 16}], ids=str)
def test_doge_masks_by_what_it_computes_and_is_refused(tmp_path, changes):
    """A fresh model, whose masks let everything pass, is refused too: nothing would train its mask."""
    folder = write(transformers.DogeConfig(**SMALL, **changes), tmp_path)
    with pytest.raises(ModelError, match="DogeAttention makes its own attention mask"):
        create(folder)
