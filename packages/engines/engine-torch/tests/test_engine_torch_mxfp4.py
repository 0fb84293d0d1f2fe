"""Folders with experts in mxfp4 are read as the format says, trained, and saved without it."""

import json

import numpy as np
import pytest
import torch
from gpt_oss_folders import write_mxfp4
from safetensors.torch import load_file

from offbeat_core import TrainEngineConfig
from offbeat_engine_torch import TorchTrainEngine
from offbeat_testing import reference_logprobs, reference_model


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Folder in mxfp4, and what its experts are."""
    folder = tmp_path_factory.mktemp("mxfp4")
    return folder, write_mxfp4(folder)


def create(folder, mesh=None, **changes):
    settings = {"device": "cpu", "learning_rate": 1e-2, **changes}
    return TorchTrainEngine.create(TrainEngineConfig(model_path=str(folder), **settings), mesh)


def assert_decoded(engine, wanted):
    found = {name: tensor.clone() for name, tensor in engine.weights()}
    assert not [name for name in found if name.endswith(("_blocks", "_scales"))]
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    for name, decoded in wanted.items():
        assert torch.equal(found[name].double(), decoded), name


def test_experts_are_what_the_format_says_of_them(packed):
    assert_decoded(create(packed[0]), packed[1])


@pytest.mark.mesh(dp=2)
def test_ranks_hold_their_part_of_what_the_format_says(packed, mesh):
    assert_decoded(create(packed[0], mesh), packed[1])


def test_a_frozen_base_holds_decoded_experts_in_bfloat16(packed):
    """In which their values are exact."""
    engine = create(packed[0], lora_rank=4, dtype="bfloat16")
    held = {piece.name: piece.local.dtype for piece in engine._policy.pieces}
    assert {held[name] for name in packed[1]} == {torch.bfloat16}
    assert_decoded(engine, packed[1])


def assert_trained_and_saved(engine, saved, sequences, loss):
    before = engine.logprobs(sequences)
    engine.forward_backward(sequences, loss)
    engine.step()
    engine.save(saved)
    after = engine.logprobs(sequences)
    if not engine.leader:
        return
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    model = reference_model(saved)
    assert set(load_file(saved / "model.safetensors")) == {name for name, _ in model.named_parameters()}
    for was, found, each in zip(before, after, sequences, strict=True):
        np.testing.assert_allclose(found, reference_logprobs(model, each.ids) * each.loss_mask, atol=1e-4)
        assert np.abs(was - found).max() > 1e-3


def test_it_is_trained_and_saved_as_a_plain_model(packed, tmp_path, make_groups, weighted_loss):
    assert_trained_and_saved(create(packed[0]), tmp_path / "saved", make_groups(), weighted_loss)


@pytest.mark.mesh(dp=2)
def test_ranks_train_it_and_save_a_plain_model(packed, mesh, tmp_path, make_groups, weighted_loss):
    assert_trained_and_saved(create(packed[0], mesh), tmp_path / "saved", make_groups(), weighted_loss)
