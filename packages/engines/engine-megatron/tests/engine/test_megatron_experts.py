"""Experts in one product, or one after the other: the same weights under the same names, whatever holds them."""

import json
import shutil

import numpy as np
import pytest
import torch
from megatron_layouts import Layout, copied, same
from megatron_yardstick import make_sequences, train_steps
from safetensors.torch import load_file
from torch import nn

from offbeat_engine_megatron._layers.experts import GroupedExperts
from offbeat_testing import reference_logprobs, reference_model

FORMS = [Layout(model="qwen3-moe", options={"experts": form}) for form in ("grouped", "sequential")]


def test_each_form_goes_on_from_what_the_other_saved(create, models, tmp_path):
    """What comes out is what went in; and after a checkpoint of either the next steps are those of its writer."""
    engines = [create(layout) for layout in FORMS]
    held = [len(engine._policy.weights.parameters) for engine in engines]
    assert held[1] - held[0] == 3 * 2 * (4 - 1)  # three sparse layers of four experts, gate and up in one, down
    wanted = load_file(models["qwen3-moe"] / "model.safetensors")
    for writer, reader in (engines, reversed(engines)):
        assert writer.steps_taken or same(copied(writer), wanted)
        train_steps(writer, 0, 2)
        writer.save(tmp_path / "saved")
        train_steps(reader, 7, 8)
        reader.load(tmp_path / "saved")
        assert same(copied(reader), copied(writer))
        assert train_steps(reader, 2, 4) == pytest.approx(train_steps(writer, 2, 4), rel=1e-6)


def test_weights_of_the_chosen_experts_are_those_of_transformers_where_they_do_not_add_up_to_1(
    create, models, tmp_path
):
    folder = shutil.copytree(models["qwen3-moe"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    model, asked = reference_model(folder), make_sequences(0)
    for sequence, found in zip(asked, create(folder=folder).logprobs(asked), strict=True):
        wanted = np.where(sequence.loss_mask, reference_logprobs(model, sequence.ids), 0.0)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 0, 0], [0, 8, 0, 0]], ids=str)
def test_grouped_experts_are_each_one_alone(counts, dtype):
    """Values and gradients, where experts get no token too, or none of them does."""
    torch.manual_seed(0)
    experts = GroupedExperts.__new__(GroupedExperts)
    nn.Module.__init__(experts)
    experts.weight1 = nn.Parameter(torch.randn(4, 32, 24).to(dtype))
    experts.weight2 = nn.Parameter(torch.randn(4, 24, 16).to(dtype))
    x, weight = torch.randn(sum(counts), 24).to(dtype).requires_grad_(), torch.rand(sum(counts))
    found, nothing = experts(x, torch.tensor(counts), weight)
    parts = []
    for number, (part, factor) in enumerate(zip(x.split(counts), weight.split(counts), strict=True)):
        gate, up = (part @ experts.weight1[number].T).chunk(2, -1)
        inner = nn.functional.silu(gate) * up * factor[:, None]
        parts.append(inner.to(dtype) @ experts.weight2[number].T)
    gradient = torch.randn(sum(counts), 24).to(dtype)
    tensors = (x, experts.weight1, experts.weight2)
    gradients = [torch.autograd.grad(out, tensors, gradient) for out in (found, torch.cat(parts))]
    assert nothing is None
    for one, other in zip((found, *gradients[0]), (torch.cat(parts), *gradients[1]), strict=True):
        torch.testing.assert_close(one, other)
