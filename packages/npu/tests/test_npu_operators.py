"""The references compute what transformers computes, and a model with them in place is the same model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat_npu import REFERENCE, substitute_operators
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
    modeling = __import__("sys").modules[type(plain).__module__]
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
