"""Qwen3.5 with its vision tower: images in front of layers with the gated delta rule."""

import json

import numpy as np
import pytest
import torch
import transformers
from pictured_sequences import Pictures, Yardstick
from safetensors.torch import load_file

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import tiny_vision_model

COUNTS = (0, 1, 3, 1)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
}
FAMILIES = {"qwen3_5": {}, "qwen3_5_moe": EXPERTS}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Tokenizer and image processor of a tiny Qwen3-VL, whose image processor Qwen3.5 has too, and another model."""
    folder = tiny_vision_model(tmp_path_factory.mktemp("vision") / request.param)
    before = json.loads((folder / "config.json").read_text())
    text = {**TEXT, **FAMILIES[request.param], "vocab_size": before["text_config"]["vocab_size"]}
    marks = {name: value for name, value in before.items() if name.endswith("_token_id")}
    shape = {"text_config": text, "vision_config": TOWER, "tie_word_embeddings": False, **marks}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **shape)
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return folder


def create(folder, mesh=None, **changes):
    settings = {"max_tokens_per_microbatch": 160, "device": "cpu"}
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **settings | changes), mesh)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_gradients_are_those_of_single_sequences_with_images(folder, weighted_loss, share):
    sequences, engine = Pictures(folder).groups(COUNTS), create(folder, options={"share_prompts": share})
    yardstick = Yardstick(folder)
    with torch.no_grad():
        wanted = [yardstick.logprobs(each).numpy() for each in sequences]
    for each, found, want in zip(sequences, engine.logprobs(sequences), wanted, strict=True):
        np.testing.assert_allclose(found[each.loss_mask], want[each.loss_mask[1:]], atol=1e-4, rtol=0)
    value = engine.forward_backward(sequences, weighted_loss)["loss"].value
    loss, grads = yardstick.gradients(sequences)
    assert value == pytest.approx(loss, rel=1e-5)
    found = {name: each.grad for name, each in engine._optimizer.parameters.items()}
    assert found.keys() == grads.keys()
    assert any("visual" in name for name in grads)
    for name, grad in grads.items():
        assert (found[name] - grad).abs().max() <= 5e-4 * grad.abs().max() + 1e-9, name


@pytest.mark.mesh(cp=2)
def test_ranks_that_share_tokens_see_the_images_among_theirs(folder, mesh, weighted_loss):
    sequences, engines = Pictures(folder).groups(COUNTS), [create(folder, each) for each in (None, mesh)]
    losses = [each.forward_backward(sequences, weighted_loss)["loss"].value for each in engines]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    norms = [each.step()["grad_norm"].value for each in engines]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    for one, many in zip(*(each.logprobs(sequences) for each in engines), strict=True):
        np.testing.assert_allclose(many, one, atol=4e-5)


def test_a_checkpoint_has_the_names_of_the_files(folder, weighted_loss, tmp_path):
    engine, sequences = create(folder), Pictures(folder).groups((1, 0))
    engine.forward_backward(sequences, weighted_loss)
    engine.step()
    engine.save(tmp_path / "saved")
    assert _names(tmp_path / "saved") == _names(folder)
    wanted = engine.logprobs(sequences)
    for found, want in zip(create(tmp_path / "saved").logprobs(sequences), wanted, strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)


def _names(folder):
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}
