import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat_core import ModelError, TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import DAMAGES, reference_logprobs, reference_model, tiny_model


def config(folder, **changes):
    settings = {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 2, "total_steps": 20} | changes
    return TrainEngineConfig(model_path=str(folder), device="cpu", **settings)


def train(engine, make_groups, loss, steps):
    losses = []
    for seed in steps:
        losses.append(engine.forward_backward(make_groups(seed=seed), loss)["loss"].value)
        engine.step()
    return losses


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_resumed_run_is_the_undisturbed_run_bit_for_bit(model_folder, tmp_path, make_groups, weighted_loss, rank):
    engine = TorchTrainEngine.create(config(model_folder, lora_rank=rank))
    train(engine, make_groups, weighted_loss, range(3))
    engine.save(tmp_path / "checkpoint")
    random = torch.rand(3)
    undisturbed = train(engine, make_groups, weighted_loss, range(3, 6))
    resumed = TorchTrainEngine.create(config(model_folder, lora_rank=rank, seed=7))
    resumed.load(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3), random)
    assert train(resumed, make_groups, weighted_loss, range(3, 6)) == undisturbed
    assert resumed.steps_taken == engine.steps_taken
    for (name, one), (_, other) in zip(engine.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_checkpoint_is_on_the_disk_when_save_returns(model_folder, tmp_path, monkeypatch, rank):
    """Every file and every folder's names, as they are in the end."""
    engine = TorchTrainEngine.create(config(model_folder, lora_rank=rank))
    synced, fsync = set(), os.fsync

    def watched(descriptor):
        fsync(descriptor)
        synced.add(content_of(os.fstat(descriptor)))

    monkeypatch.setattr(os, "fsync", watched)
    folder = tmp_path / "checkpoint"
    engine.save(folder)
    assert [path for path in (folder, *folder.rglob("*")) if content_of(path.stat()) not in synced] == []


def content_of(status):
    return status.st_ino, status.st_size, status.st_mtime_ns


def test_a_load_brings_the_count_of_refused_steps_and_leaves_no_gradient_of_before(
    model_folder, tmp_path, make_groups, weighted_loss
):
    engine = TorchTrainEngine.create(config(model_folder))
    engine.forward_backward(make_groups(), lambda tokens: (tokens.logprobs_N.sum() * float("nan"), {}))
    assert engine.step()["steps_refused"].value == 1
    engine.save(tmp_path)
    undisturbed = train(engine, make_groups, weighted_loss, range(2))
    resumed = TorchTrainEngine.create(config(model_folder))
    resumed.forward_backward(make_groups(seed=9), weighted_loss)  # of an update that was not taken any more
    resumed.load(tmp_path)
    assert (resumed.steps_taken, resumed.steps_refused) == (0, 1)
    assert train(resumed, make_groups, weighted_loss, range(2)) == undisturbed


@pytest.mark.parametrize("tied", [True, False])
def test_plain_transformers_loads_what_is_saved(tmp_path, make_groups, weighted_loss, tied):
    folder = tiny_model(tmp_path / "model", "llama", tied=tied, hidden_size=32)
    engine = TorchTrainEngine.create(config(folder))
    train(engine, make_groups, weighted_loss, range(2))
    engine.save_weights(tmp_path / "export")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    names = [name for name, _ in engine.weights()]
    assert ("lm_head.weight" in names) is not tied
    for name, tensor in engine.weights():
        assert torch.equal(loaded[name], tensor)
    text = "the sum of two numbers"
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "export")]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_lora_trains_adapters_only_and_merges_exactly(model_folder, tmp_path, make_groups, weighted_loss):
    engine = TorchTrainEngine.create(config(model_folder, lora_rank=4, lora_alpha=16.0))
    base = reference_model(model_folder)
    adapted = {name for name, module in base.model.named_modules() if isinstance(module, torch.nn.Linear)}
    trained = set(engine._optimizer.parameters)
    assert trained == {f"model.{name}.lora_{side}" for name in adapted for side in "AB"}
    sequences = make_groups(seed=9)
    first = engine.logprobs(sequences)
    train(engine, make_groups, weighted_loss, range(3))
    now = engine.logprobs(sequences)
    assert not all(np.allclose(one, other, atol=1e-4) for one, other in zip(first, now, strict=True))
    for one, other in zip(first, engine.logprobs(sequences, reference=True), strict=True):
        np.testing.assert_array_equal(one, other)
    before = dict(base.named_parameters())
    for name, tensor in engine.weights():
        moved = not torch.equal(tensor, before[name])
        assert moved == (name.removeprefix("model.").removesuffix(".weight") in adapted and name.endswith(".weight"))
    engine.save(tmp_path / "saved")
    merged = reference_model(tmp_path / "saved")
    for sequence, found in zip(sequences, now, strict=True):
        wanted = reference_logprobs(merged, sequence.ids)[sequence.loss_mask]
        np.testing.assert_allclose(found[sequence.loss_mask], wanted, atol=1e-5)


def test_experts_without_adapters_are_said(tmp_path, caplog):
    folder = tiny_model(tmp_path / "moe", "qwen3_moe", hidden_size=32)
    engine = TorchTrainEngine.create(config(folder, lora_rank=4))
    assert not any("experts" in name for name in engine._optimizer.parameters)
    assert "4 weights of fused experts, first layers.0.mlp.experts.gate_up_proj, get no adapters" in caplog.text


def test_peft_reads_the_adapters(model_folder, tmp_path, make_groups, weighted_loss):
    peft = pytest.importorskip("peft")
    engine = TorchTrainEngine.create(config(model_folder, lora_rank=4))
    train(engine, make_groups, weighted_loss, range(2))
    engine.save(tmp_path / "saved")
    adapted = peft.PeftModel.from_pretrained(reference_model(model_folder), tmp_path / "saved" / "adapter").eval()
    for sequence, found in zip(make_groups(), engine.logprobs(make_groups()), strict=True):
        wanted = reference_logprobs(adapted, sequence.ids)[sequence.loss_mask]
        np.testing.assert_allclose(found[sequence.loss_mask], wanted, atol=1e-5)


@pytest.mark.parametrize(
    "broken", ["trainer/engine.json", "trainer/optimizer-00001-of-00001.safetensors", "model.safetensors"]
)
@pytest.mark.parametrize("how", ["missing", *DAMAGES])
def test_a_broken_checkpoint_is_refused(model_folder, tmp_path, broken, how):
    engine = TorchTrainEngine.create(config(model_folder))
    engine.save(tmp_path)
    file = tmp_path / broken
    content = file.read_bytes()
    file.unlink() if how == "missing" else file.write_bytes(DAMAGES[how](content))
    with pytest.raises(ModelError, match=str(tmp_path)):
        engine.load(tmp_path)


def test_a_checkpoint_of_another_shape_or_kind_is_refused(model_folder, tmp_path, make_groups, weighted_loss):
    engine = TorchTrainEngine.create(config(model_folder, lora_rank=4))
    train(engine, make_groups, weighted_loss, range(1))
    engine.save(tmp_path / "lora")
    full = TorchTrainEngine.create(config(model_folder))
    with pytest.raises(ModelError, match="lora_rank"):
        full.load(tmp_path / "lora")
    full.save(tmp_path / "full")
    with pytest.raises(ModelError, match="lora_rank"):
        engine.load(tmp_path / "full")
    with pytest.raises(ModelError, match="lora_rank"):
        TorchTrainEngine.create(dataclasses.replace(engine.config, lora_rank=2)).load(tmp_path / "lora")
    other = tiny_model(tmp_path / "other", "qwen3", hidden_size=64)
    with pytest.raises(ModelError, match="another model"):
        TorchTrainEngine.create(config(other)).load(tmp_path / "full")


def drop_digests(folder):
    """Make it a checkpoint of a version that has none, whose files may be edited."""
    for file in folder.rglob("*.xxh3"):
        file.unlink()


def test_a_checkpoint_of_format_1_is_still_read(model_folder, tmp_path, make_groups, weighted_loss):
    engine = TorchTrainEngine.create(config(model_folder))
    train(engine, make_groups, weighted_loss, range(3))
    engine.save(tmp_path)
    trainer = tmp_path / "trainer"
    tensors = load_file(trainer / "optimizer-00001-of-00001.safetensors")
    state = json.loads((trainer / "engine.json").read_text())
    steps = {name: part["step"] for parts in state.pop("parts").values() for name, part in parts.items()}
    old = {name if name.startswith("rng.") else f"adam.{name}": tensor for name, tensor in tensors.items()}
    old |= {f"adam.step.{name}": torch.tensor(step) for name, step in steps.items()}
    save_file(old, trainer / "optimizer.safetensors")
    (trainer / "engine.json").write_text(json.dumps(state | {"format": 1}))
    (trainer / "optimizer-00001-of-00001.safetensors").unlink()
    drop_digests(tmp_path)
    resumed = TorchTrainEngine.create(config(model_folder))
    resumed.load(tmp_path)
    undisturbed = train(engine, make_groups, weighted_loss, range(3, 6))
    assert train(resumed, make_groups, weighted_loss, range(3, 6)) == undisturbed


def test_a_checkpoint_of_a_later_format_is_refused(model_folder, tmp_path):
    engine = TorchTrainEngine.create(config(model_folder))
    engine.save(tmp_path)
    file = tmp_path / "trainer" / "engine.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    drop_digests(tmp_path)
    with pytest.raises(ModelError, match="got 3"):
        engine.load(tmp_path)


def test_large_models_are_written_in_several_files(model_folder, tmp_path, make_groups, weighted_loss, monkeypatch):
    monkeypatch.setattr("offbeat_training._tensor_files.MAX_FILE_BYTES", 30_000)
    engine = TorchTrainEngine.create(config(model_folder))
    train(engine, make_groups, weighted_loss, range(1))
    engine.save(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    other = TorchTrainEngine.create(config(model_folder))
    other.load(tmp_path)
    for (name, tensor), (_, read) in zip(engine.weights(), other.weights(), strict=True):
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(read, tensor)
    train(engine, make_groups, weighted_loss, range(1, 2))
    for max_bytes in (60_000, 2**30, 30_000):  # into the same folder, under other names each time
        monkeypatch.setattr("offbeat_training._tensor_files.MAX_FILE_BYTES", max_bytes)
        engine.save(tmp_path)
        other.load(tmp_path)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(engine.weights(), other.weights(), strict=True))


def test_two_models_in_one_folder_are_refused_unless_the_index_decides(model_folder, tmp_path):
    engine = TorchTrainEngine.create(config(model_folder))
    engine.save(tmp_path)
    first = tmp_path / "model.safetensors"
    save_file(
        {name: tensor + 1 for name, tensor in load_file(first).items()}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(ModelError, match=r"twice, in model-00002-of-00002.* and in model\.safe"):
        engine.load(tmp_path)
    first.rename(tmp_path / "model-00001-of-00001.safetensors")
    drop_digests(tmp_path)
    weights = {name: "model-00001-of-00001.safetensors" for name, _ in engine.weights()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
