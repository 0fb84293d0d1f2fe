"""Norms computed in fewer passes are the norms of transformers."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from offbeat_engine_torch._layers.norm import fuse_norms, rms_norm


@pytest.mark.parametrize("shape", [(7, 12), (1, 5, 3, 16)])
def test_values_and_gradients_are_those_of_autograd_in_float64(shape):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(shape[-1], generator=draw, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape[::-1], generator=draw, dtype=torch.float64).permute(*range(len(shape))[::-1])
    wanted = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    found = rms_norm(x, weight, 1e-3, torch.float64)
    assert torch.allclose(found, wanted, rtol=1e-13)
    for one, other in zip(
        torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(wanted, (x, weight), grad), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear, self.last = norm(32), nn.Linear(32, 32), norm(32)

    def forward(self, x):
        return self.last(self.linear(self.norm(x)))


def is_fused(module):
    return type(module).__name__.startswith("Fused")


def test_only_norms_of_this_form_are_exchanged():
    llama, gemma = Block(LlamaRMSNorm), Block(GemmaRMSNorm)
    for block in (llama, gemma):
        fuse_norms(block, block.last)
    assert is_fused(llama.norm)
    assert not is_fused(gemma.norm)


class MaybeScaledRMSNorm(LlamaRMSNorm):
    """Gemma 4's has a weight in some places; torch's own may have None."""

    def __init__(self, size, scales=True):
        super().__init__(size)
        if not scales:
            del self.weight

    def forward(self, x):
        return super().forward(x) if "weight" in self._parameters else x * (x.square().mean(-1, True) + 1e-6).rsqrt()


def test_a_norm_without_a_weight_is_left_as_it_is():
    block, x = Block(MaybeScaledRMSNorm), torch.randn(2, 9, 32)
    block.last = MaybeScaledRMSNorm(32, scales=False)
    block.linear = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32, elementwise_affine=False))
    wanted = block(x)
    fuse_norms(block, None)
    assert is_fused(block.norm)
    assert not is_fused(block.last)
    assert torch.allclose(block(x), wanted, atol=1e-5)


def test_what_comes_behind_a_norm_is_what_autocast_gave_it():
    torch.manual_seed(0)
    block, x = Block(LlamaRMSNorm), torch.randn(2, 9, 32)
    nn.init.uniform_(block.norm.weight)
    exact = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = block(x)
    fuse_norms(block, block.last)
    with torch.autocast("cpu", torch.bfloat16):
        found = block(x)
        assert block.norm(x).dtype == torch.bfloat16
        assert block.last(x).dtype == torch.float32
    assert found.dtype == wanted.dtype
    assert torch.allclose(found, wanted, atol=0.02)
    assert torch.allclose(block(x), exact, atol=1e-6)
