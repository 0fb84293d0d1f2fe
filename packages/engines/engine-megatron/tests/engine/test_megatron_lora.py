"""Adapters train alone, and leave under PEFT's names and merged. `test_megatron_layouts` compares their training."""

import json

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, copied, same
from megatron_yardstick import LORA_RANK, make_sequences, train_steps
from safetensors.torch import load_file

from offbeat_core import ModelError, PeerFailedError
from offbeat_engine_megatron._lora import Adapter
from offbeat_engine_megatron._weights import Gathering
from offbeat_testing import reference_logprobs, reference_model

PREFIX = "base_model.model."
LORA = Layout(lora=True)


@pytest.mark.mesh(tp=2, pp=2)
@pytest.mark.mesh(tp=2, dp=2)
def test_what_leaves_merged_is_the_base_and_what_leaves_alone(create, mesh, model_folder):
    engine = create(LORA, mesh)
    base = copied(engine)
    assert same(base, dict(reference_model(model_folder).named_parameters()))  # B is 0 at first
    train_steps(engine, 0, 2)
    adapters = {name: tensor.clone() for name, tensor in engine.weights(part="adapter")}
    changed = 0
    for name, tensor in engine.weights():
        stem = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapters:
            down, up = adapters.pop(f"{stem}.lora_A.weight"), adapters.pop(f"{stem}.lora_B.weight")
            torch.testing.assert_close(tensor, base[name] + 2.0 * up @ down, atol=1e-7, rtol=1e-6)
            changed += not torch.equal(tensor, base[name])
        else:
            assert torch.equal(tensor, base[name]), name
    assert not adapters
    assert changed == 7 * 4


@pytest.mark.mesh(tp=2, pp=2)
def test_rounding_before_gathering_gives_the_same(create, mesh):
    engine = create(LORA, mesh)
    train_steps(engine, 0, 1)
    for part in ("merged", "base", "adapter"):
        whole = {name: tensor.bfloat16() for name, tensor in engine.weights(part=part)}
        rounded = {name: tensor.clone() for name, tensor in engine.weights("bfloat16", part=part)}
        assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
        assert same(rounded, whole), part


@pytest.mark.mesh(tp=2)
def test_a_layer_is_merged_once_however_many_rounds_it_travels_in(create, mesh, monkeypatch):
    engine = create(LORA, mesh)
    merged, rounds = [], []
    merge, gather = Adapter.merged, Gathering._gather
    monkeypatch.setattr(Adapter, "merged", lambda self, weight: (merged.append(self), merge(self, weight))[1])
    monkeypatch.setattr(Gathering, "_gather", lambda *given: (rounds.append(1), gather(*given))[1])
    monkeypatch.setattr("offbeat_engine_megatron._weights.BUCKET_BYTES", 2**13)
    num_slots = len([name for name, _ in engine.weights()])
    assert len(rounds) > 4 * num_slots
    assert 0 < len(merged) <= num_slots


@pytest.mark.parametrize(
    "mesh", [{"pp": 2, "dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.nightly)], ids=str, indirect=True
)
@pytest.mark.mesh
def test_the_first_policy_is_the_base_without_a_second_copy(create, mesh, model_folder, shared):
    engine = create(LORA, mesh)
    trained = {name for part in engine._optimizer.parts for name, each in part.named_parameters() if each.requires_grad}
    assert trained
    assert all(".adapter." in name for name in trained)
    train_steps(engine, 0, 2)
    asked = make_sequences(5)
    first = engine.logprobs(asked, reference=True)
    assert engine._reference is None
    folder = shared / f"merged-{mesh.size}"
    engine.save_weights(folder)
    for source, found in ((model_folder, first), (folder, engine.logprobs(asked))):
        model = reference_model(source)
        for sequence, values in zip(asked, found, strict=True):
            wanted = np.where(sequence.loss_mask, reference_logprobs(model, sequence.ids), 0.0)
            np.testing.assert_allclose(values, wanted, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.mesh(tp=2, pp=2)
def test_a_layout_saves_adapters(create, mesh, shared):
    engine = create(LORA, mesh)
    train_steps(engine, 0, 2)
    engine.save(shared / "saved")
    adapters = {name: tensor.clone() for name, tensor in engine.weights(part="adapter")}
    reported = train_steps(engine, 2, 4)
    if engine.leader:
        (shared / "reported.json").write_text(json.dumps(reported))
        assert same(adapters, load_file(shared / "saved" / "adapter" / "adapter_model.safetensors"))
        settings = json.loads((shared / "saved" / "adapter" / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (LORA_RANK, 2.0 * LORA_RANK)
        modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert settings["target_modules"] == modules


@pytest.mark.nightly
@pytest.mark.mesh(dp=2)
@pytest.mark.mesh(tp=2)
def test_another_layout_goes_on_from_them(create, mesh, shared):
    engine = create(LORA, mesh)
    train_steps(engine, 7, 8)  # something to forget
    engine.load(shared / "saved")
    wanted = json.loads((shared / "reported.json").read_text())
    np.testing.assert_allclose(train_steps(engine, 2, 4), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize("rank", [0, LORA_RANK + 1])
def test_a_checkpoint_of_another_rank_is_refused(create, mesh, shared, rank):
    engine = create(LORA, mesh, lora_rank=rank)
    with pytest.raises((ModelError, PeerFailedError), match="same lora_rank"):
        engine.load(shared / "saved")


@pytest.mark.mesh(dp=2, ep=2)
def test_experts_stay_as_they_are(create, mesh):
    engine = create(Layout(model="qwen3-moe", lora=True), mesh)
    base = copied(engine)
    train_steps(engine, 0, 1)
    changed = {name for name, tensor in engine.weights() if not torch.equal(tensor, base[name])}
    assert changed
    assert not any(".experts." in name or "mlp.gate." in name for name in changed)
