"""Adapters train alone, and leave under PEFT's names and merged. `test_megatron_layouts` compares their training."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, engine_config, make_model
from megatron_yardstick import LORA_RANK, make_sequences, train_steps
from safetensors.torch import load_file

from offbeat_engine_megatron import MegatronTrainEngine
from offbeat_engine_megatron._lora import Adapter
from offbeat_engine_megatron._weights import Gathering
from offbeat_testing import reference_logprobs, reference_model
from offbeat_types import ModelError, PeerFailedError

PREFIX = "base_model.model."


def config(folder, **settings):
    return engine_config(folder, Layout(lora=True, **settings))


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that ranks and tests share."""
    return tmp_path_factory.mktemp("lora")


@pytest.mark.mesh(tp=2, pp=2)
@pytest.mark.mesh(tp=2, dp=2)
def test_what_leaves_merged_is_the_base_and_what_leaves_alone(mesh, model_folder):
    engine = MegatronTrainEngine.create(config(model_folder), mesh)
    base = {name: tensor.clone() for name, tensor in engine.weights()}
    untouched = dict(reference_model(model_folder).named_parameters())
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in base.items())  # B is 0 at first
    train_steps(engine, 0, 2)
    adapters = {name: tensor.clone() for name, tensor in engine.adapter_weights()}
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


@pytest.mark.mesh(tp=2)
def test_a_layer_is_merged_once_however_many_rounds_it_travels_in(mesh, model_folder, monkeypatch):
    engine = MegatronTrainEngine.create(config(model_folder), mesh)
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
def test_the_first_policy_is_the_base_without_a_second_copy(mesh, model_folder, shared):
    engine = MegatronTrainEngine.create(config(model_folder), mesh)
    trained = {name for part in engine._optimizer.parts for name, each in part.named_parameters() if each.requires_grad}
    assert trained
    assert all(".adapter." in name for name in trained)
    train_steps(engine, 0, 2)
    asked = make_sequences(5)
    first = engine.logprobs(asked, reference=True)
    assert engine._reference is None
    folder = shared / f"merged-{'-'.join(map(str, mesh.axes.values()))}"
    engine.save_weights(folder)
    for source, found in ((model_folder, first), (folder, engine.logprobs(asked))):
        model = reference_model(source)
        for sequence, values in zip(asked, found, strict=True):
            wanted = np.where(sequence.loss_mask, reference_logprobs(model, sequence.ids), 0.0)
            np.testing.assert_allclose(values, wanted, atol=1e-5)


WRITER, READERS = {"tp": 2, "pp": 2}, ({"dp": 2}, {"tp": 2})


@pytest.mark.nightly
@pytest.mark.mesh(**WRITER)
def test_a_layout_saves_adapters(mesh, model_folder, shared):
    engine = MegatronTrainEngine.create(config(model_folder), mesh)
    train_steps(engine, 0, 2)
    engine.save(shared / "saved")
    adapters = {name: tensor.clone() for name, tensor in engine.adapter_weights()}
    told = train_steps(engine, 2, 4)
    if engine.leader:
        (shared / "told.json").write_text(json.dumps(told))
        saved = load_file(shared / "saved" / "adapter" / "adapter_model.safetensors")
        assert all(torch.equal(tensor, saved.pop(name)) for name, tensor in adapters.items())
        assert not saved
        settings = json.loads((shared / "saved" / "adapter" / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (LORA_RANK, 2.0 * LORA_RANK)
        modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert settings["target_modules"] == modules


@pytest.mark.nightly
@pytest.mark.mesh(**READERS[0])
@pytest.mark.mesh(**READERS[1])
def test_another_layout_goes_on_from_them(mesh, model_folder, shared):
    engine = MegatronTrainEngine.create(config(model_folder), mesh)
    train_steps(engine, 7, 8)  # something to forget
    engine.load(shared / "saved")
    wanted = json.loads((shared / "told.json").read_text())
    np.testing.assert_allclose(train_steps(engine, 2, 4), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.mesh(dp=2, compare=False)
@pytest.mark.parametrize("rank", [0, LORA_RANK + 1])
def test_a_checkpoint_of_another_rank_is_refused(mesh, model_folder, shared, rank):
    settings = dataclasses.replace(config(model_folder), lora_rank=rank)
    engine = MegatronTrainEngine.create(settings, mesh)
    with pytest.raises((ModelError, PeerFailedError), match="same lora_rank"):
        engine.load(shared / "saved")


@pytest.fixture(scope="session")
def moe_folder(shared):
    return make_model(shared / "moe", "qwen3-moe")


@pytest.mark.mesh(dp=2, ep=2)
def test_experts_stay_as_they_are(mesh, moe_folder):
    engine = MegatronTrainEngine.create(config(moe_folder, model="qwen3-moe"), mesh)
    base = {name: tensor.clone() for name, tensor in engine.weights()}
    train_steps(engine, 0, 1)
    changed = {name for name, tensor in engine.weights() if not torch.equal(tensor, base[name])}
    assert changed
    assert not any(".experts." in name or "mlp.gate." in name for name in changed)
