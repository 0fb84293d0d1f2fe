"""Biases by which routers choose experts, buffers or parameters of their family: read, kept, handed on in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine, _policy
from offbeat_engine_torch._model import load_model
from offbeat_testing import reference_logprobs, reference_model

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "DeepseekV3": {"n_routed_experts": 8, **LATENT},
    "Glm4Moe": {"n_routed_experts": 8},
    "Dots1": {"n_routed_experts": 8},
    "MiniMaxM2": {"num_local_experts": 8},
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
}


def write_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for _, bias in biases(model.state_dict().items()):
        bias.copy_(torch.randn_like(bias))
    model.save_pretrained(folder)
    return folder


def biases(named):
    return [(name, tensor) for name, tensor in named if name.endswith("e_score_correction_bias")]


def config(folder, **more):
    return TrainEngineConfig(model_path=str(folder), device="cpu", learning_rate=1e-2, **more)


def assert_agrees(engine, folder, sequences):
    """Log-probabilities are those of transformers on what lies in `folder`; its biases are handed on as they are."""
    model = reference_model(folder)
    for sequence, found in zip(sequences, engine.logprobs(sequences), strict=True):
        wanted = reference_logprobs(model, sequence.ids) * sequence.loss_mask
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    wanted = dict(biases(model.state_dict().items()))
    found = {name: tensor.clone() for name, tensor in biases(engine.weights("bfloat16"))}
    assert engine.float32_weights >= found.keys() == wanted.keys() != set()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def train_and_save(engine, folder, make_groups, loss):
    engine.forward_backward(make_groups(), loss)
    assert engine.step()["grad_norm"].value > 0
    engine.save(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_buffers_are_read_kept_and_handed_on(family, tmp_path, make_groups, weighted_loss):
    folder = write_model(tmp_path / "model", family)
    engine = TorchTrainEngine.create(config(folder))
    assert_agrees(engine, folder, make_groups(seed=3))
    train_and_save(engine, tmp_path / "saved", make_groups, weighted_loss)
    assert_agrees(engine, tmp_path / "saved", make_groups(seed=3))
    resumed = TorchTrainEngine.create(config(write_model(tmp_path / "other", family, seed=1)))
    resumed.load(tmp_path / "saved")
    assert_agrees(resumed, tmp_path / "saved", make_groups(seed=3))


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_read_keep_and_hand_on_buffers(mesh, tmp_path, make_groups, weighted_loss, monkeypatch):
    """Of a family whose files are converted, which one rank alone does: it takes a second copy of the model."""
    converted = []
    monkeypatch.setattr(_policy, "load_model", lambda *args, **more: converted.append(1) or load_model(*args, **more))
    if mesh.rank == 0:
        write_model(tmp_path / "model", "MiniMaxM2")
        write_model(tmp_path / "other", "MiniMaxM2", seed=1)
    mesh.group("dp").barrier()
    engine = TorchTrainEngine.create(config(tmp_path / "model"), mesh)
    assert len(converted) == (1 if mesh.rank == 0 else 0)
    assert_agrees(engine, tmp_path / "model", make_groups(seed=3))
    train_and_save(engine, tmp_path / "saved", make_groups, weighted_loss)
    engine.sleep(2)
    engine.wake()
    assert_agrees(engine, tmp_path / "saved", make_groups(seed=3))
    resumed = TorchTrainEngine.create(config(tmp_path / "other"), mesh)
    resumed.load(tmp_path / "saved")
    assert_agrees(resumed, tmp_path / "saved", make_groups(seed=3))


@pytest.mark.mesh(dp=2, compare=False)
def test_ranks_of_bfloat16_gather_in_float32_what_the_family_keeps_so(mesh, tmp_path, make_groups, weighted_loss):
    """Ernie 4.5 keeps its routers so, which are trained, and their biases; the other weights of a layer are rounded."""
    if mesh.rank == 0:
        write_model(tmp_path / "model", "Ernie4_5_Moe")
    mesh.group("dp").barrier()
    engine = TorchTrainEngine.create(config(tmp_path / "model", dtype="bfloat16"), mesh)
    (layer,) = (layer.mlp for layer in engine._policy.model.decoder.layers if hasattr(layer.mlp, "gate"))
    seen = {}
    for module in (layer.gate, layer.shared_experts.down_proj):
        module.register_forward_pre_hook(lambda module, _: seen.update({module: module.weight.detach().clone()}))
    engine.logprobs(make_groups())
    held = reference_model(tmp_path / "model").state_dict()
    router = next(name for name in held if name.endswith("gate.weight"))
    assert torch.equal(seen[layer.gate], held[router])
    assert seen[layer.shared_experts.down_proj].dtype == torch.bfloat16
    sent = {name: tensor.clone() for name, tensor in engine.weights("bfloat16")}
    assert {name for name, tensor in sent.items() if tensor.dtype == torch.float32} == engine.float32_weights
    assert engine.float32_weights == {router, *(name for name, _ in biases(held.items()))}
    assert all(torch.equal(sent[name], held[name]) for name in engine.float32_weights)
    engine.forward_backward(make_groups(), weighted_loss)
    engine.step()
    moved = dict(engine.weights())[router]
    assert not torch.equal(moved, held[router])
