"""The references compute what transformers computes, and a model with them in place is the same model."""

import sys
from dataclasses import replace

import pytest
import torch
from npu_pictures import IMAGES, pictured
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
)

from offbeat_npu import REFERENCE, substitute_operators
from offbeat_npu._operators import _rotates_halves, _rotation
from offbeat_testing import tiny_model


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_model_with_operators_in_place_is_the_same_model(tmp_path, family):
    folder = tiny_model(tmp_path / family, family, hidden_size=32)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = plain(ids, labels=ids)
    expected.loss.backward()

    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    calls = []
    counted = type(REFERENCE)(
        **{name: counting(getattr(REFERENCE, name), name, calls) for name in REFERENCE.__dataclass_fields__}
    )
    modeling = sys.modules[type(plain).__module__]
    rotation = modeling.apply_rotary_pos_emb
    try:
        assert substitute_operators(ours, counted) == ("rms_norm", "swiglu", "rotary")
        found = ours(ids, labels=ids)
        found.loss.backward()
    finally:
        modeling.apply_rotary_pos_emb = rotation
    num_layers = ours.config.num_hidden_layers
    num_norms = 2 * num_layers + 1 + (2 * num_layers if family == "qwen3" else 0)
    counts = {name: calls.count(name) for name in set(calls)}
    assert counts == {"npu_rms_norm": num_norms, "npu_swiglu": num_layers, "npu_rotary_mul": 2 * num_layers}
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    for (name, one), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert list(ours.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_model_that_sees_is_the_same_model(tmp_path, monkeypatch, family):
    ids, _ = pictured(tmp_path, family)
    ids = torch.from_numpy(ids.astype("int64"))[None]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    seen = AutoImageProcessor.from_pretrained(tmp_path)(
        images=list(IMAGES), input_data_format="channels_last", return_tensors="pt"
    )
    seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    expected = model(ids, **seen).logits.log_softmax(-1)
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # put back when it has changed
    assert substitute_operators(model, REFERENCE) == ("rms_norm", "swiglu", "rotary")
    torch.testing.assert_close(model(ids, **seen).logits.log_softmax(-1), expected, rtol=0, atol=1e-4)


def test_the_rotation_of_a_second_model_is_the_operator_too(tmp_path, monkeypatch):
    """By then the function of its family is the operator, which takes no tensors of the CPU to be tried with."""

    def refuse(*_, **__):
        raise RuntimeError("tensors of the CPU")

    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model", hidden_size=32))
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # put back when it has changed
    for _ in range(2):
        replaced = substitute_operators(model, replace(REFERENCE, npu_rotary_mul=refuse))
        assert replaced == ("rms_norm", "swiglu", "rotary")


def test_a_rotation_that_interleaves_is_left_alone(monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Ernie4_5ForCausalLM(Ernie4_5Config(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=320))
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # put back if it changes
    ids = torch.arange(3, 12)[None]
    expected = model(ids).logits
    assert "rotary" not in substitute_operators(model, REFERENCE)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["of a part of each head", "of one tensor"])
def test_a_rotation_of_another_kind_is_left_alone(how):
    def rotate_part(query, key, cos, sin, unsqueeze_dim=1):
        size = cos.shape[-1]
        found = _rotation(REFERENCE)(query[..., :size], key[..., :size], cos, sin, unsqueeze_dim)
        return tuple(torch.cat((new, x[..., size:]), -1) for new, x in zip(found, (query, key), strict=True))

    assert not _rotates_halves(rotate_part if how == "of a part of each head" else lambda x, cos, sin: x)
    assert _rotates_halves(_rotation(REFERENCE))


def counting(operator, name, calls):
    def counted(*args, **kwargs):
        calls.append(name)
        return operator(*args, **kwargs)

    return counted


def test_a_layer_that_computes_something_else_is_left_alone():
    class GeluBlock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = self.up_proj = self.down_proj = torch.nn.Identity()
            self.act_fn = torch.nn.GELU()

    class OffsetRMSNorm(torch.nn.Module):
        """Multiplies by 1 + weight, as Gemma's does, and has no `variance_epsilon`."""

        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.zeros(4)), 1e-6

    assert substitute_operators(torch.nn.Sequential(GeluBlock(), OffsetRMSNorm()), REFERENCE) == ()
