"""Adapters: what they add to a layer, what is trained of it, and which folders they are read from."""

import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_core import ModelError
from offbeat_training import (
    LoraLinear,
    adapter_shapes,
    add_lora,
    check_adapter_folder,
    initial_adapters,
    lora_layers,
    open_adapters,
    save_adapter,
    without_lora,
)


def make_model(rank=2, alpha=6.0):
    """Two linear layers, and a norm between them, with adapters that add something."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))
    add_lora(model, rank=rank, alpha=alpha)
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_A.weight)
        nn.init.normal_(layer.lora_B.weight)
    return model


def test_an_adapter_adds_its_scaled_product_and_nothing_while_it_is_off():
    layer = make_model()[0]
    x = torch.randn(7, 5)
    base = x @ layer.lora_base.weight.T + layer.lora_base.bias
    added = 6.0 / 2 * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    torch.testing.assert_close(layer(x), base + added)
    with without_lora([layer]):
        torch.testing.assert_close(layer(x), base)
    torch.testing.assert_close(layer(x), base + added)
    with pytest.raises(ValueError, match="within"), without_lora([layer]):
        raise ValueError("within")
    torch.testing.assert_close(layer(x), base + added, msg="an error leaves them on")


def test_adapters_alone_are_trained_on_all_linear_layers():
    model = make_model()
    assert list(lora_layers(model)) == ["0", "2"]
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {f"{layer}.lora_{side}.weight" for layer in "02" for side in "AB"}
    with pytest.raises(ModelError, match="has none"):
        add_lora(nn.Sequential(nn.Tanh()), rank=2, alpha=4.0)


def test_training_starts_at_the_base_model_with_values_that_the_seed_says():
    shapes = list(adapter_shapes(make_model()))
    assert shapes == [("0.lora_A", (2, 5)), ("0.lora_B", (4, 2)), ("2.lora_A", (2, 4)), ("2.lora_B", (3, 2))]
    values, again, other = (dict(initial_adapters(shapes, seed)) for seed in (1, 1, 2))
    for name, shape in shapes:
        assert values[name].shape == shape
        assert bool(values[name].any()) == name.endswith("lora_A")
        assert torch.equal(values[name], again[name])
    assert not torch.equal(values["0.lora_A"], other["0.lora_A"])
    assert not torch.equal(values["0.lora_A"][:, :4], values["2.lora_A"])
    assert values["0.lora_A"].abs().max() <= 5**-0.5, "uniform up to 1 / sqrt(in)"


def test_what_is_saved_is_read_again_by_a_model_of_the_same_rank_alone(tmp_path):
    model = make_model()
    tensors = {
        f"{name}.lora_{side}": getattr(layer, f"lora_{side}").weight.detach()
        for name, layer in lora_layers(model).items()
        for side in "AB"
    }
    save_adapter(model, tensors, tmp_path, base_model="a/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 6.0, "a/base")
    assert config["target_modules"] == ["0", "2"]
    shapes = dict(adapter_shapes(model))
    with open_adapters(tmp_path, shapes) as found:
        assert all(torch.equal(found.read(name, ()), tensor) for name, tensor in tensors.items())
    fewer = {name: shape for name, shape in shapes.items() if name.startswith("0")}
    for others in (dict(adapter_shapes(make_model(rank=3))), fewer, shapes | {"4.lora_A": (2, 5)}):
        with pytest.raises(ModelError, match="use the same lora_rank"):
            open_adapters(tmp_path, others)


def test_a_checkpoint_with_adapters_and_an_engine_without_are_refused_both_ways(tmp_path):
    check_adapter_folder(tmp_path, wanted=False)
    with pytest.raises(ModelError, match="holds no adapters, yet lora_rank is set"):
        check_adapter_folder(tmp_path, wanted=True)
    (tmp_path / "adapter").mkdir()
    check_adapter_folder(tmp_path, wanted=True)
    with pytest.raises(ModelError, match="was saved with LoRA"):
        check_adapter_folder(tmp_path, wanted=False)


def test_an_adapter_is_in_float32_at_least_and_in_the_mode_of_its_layer():
    for dtype, wanted in {torch.bfloat16: torch.float32, torch.float64: torch.float64}.items():
        layer = LoraLinear(nn.Linear(4, 4).to(dtype).eval(), 2, 4.0)
        assert layer.lora_base.weight.dtype == dtype
        assert layer.lora_A.weight.dtype == layer.lora_B.weight.dtype == wanted
        assert not layer.training


class Copies(TorchDispatchMode):
    """Notes in what formats a tensor is copied."""

    def __init__(self, watched):
        super().__init__()
        self.watched, self.formats = watched.data_ptr(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() == self.watched:
            self.formats.append(kwargs["dtype"])
        return func(*args, **kwargs)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_frozen_layer_of_bfloat16_multiplies_in_it_without_a_copy(autocast):
    """The update is computed in the format of autocast, or in float32, in which then the sum is."""
    torch.manual_seed(0)
    layer, x = LoraLinear(nn.Linear(6, 5).bfloat16(), 2, 4.0), torch.randn(7, 6, requires_grad=True)
    for side in (layer.lora_A, layer.lora_B):
        nn.init.normal_(side.weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Copies(layer.lora_base.weight) as copies:
        found = layer(x)
        with without_lora([layer]):
            base = layer(x)
        found.sum().backward()
    assert copies.formats == []
    assert found.dtype == base.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(base.bfloat16(), layer.lora_base(x.bfloat16()))
    low, up, scale = layer.lora_A.weight, layer.lora_B.weight, 4.0 / 2
    exact = layer.lora_base(x.bfloat16()).double() + scale * (x.double() @ low.T.double() @ up.T.double())
    added = scale * (x.abs() @ low.T.abs() @ up.T.abs()) + layer.lora_base(x.bfloat16()).abs()
    # Without autocast the update alone is added in float32; with it each of factors, products and sum is rounded.
    bound = (8 * torch.finfo(torch.bfloat16).eps if autocast else 8 * torch.finfo(torch.float32).eps) * added
    assert bool(((found - exact).abs() <= bound).all())
    for side in (layer.lora_A, layer.lora_B):
        assert side.weight.grad.dtype == torch.float32
    assert layer.lora_base.weight.grad is None
