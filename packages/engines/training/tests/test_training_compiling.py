"""Compiled passes over logits, and compiled updates of weights, compute the same."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from offbeat_core import TrainEngineConfig
from offbeat_device import prepare_compiler
from offbeat_training import ClippedAdamW, _logprobs, token_logprobs
from offbeat_training._optimizers import adamw

NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=[pytest.mark.nightly, NEEDS_COMPILER])])
def counter(request, monkeypatch, tmp_path):
    """Count graphs; by day they run without generated code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    _logprobs._fused.cache_clear()
    adamw._compiled_update.cache_clear()
    counting, compile_ = CompileCounterWithBackend(request.param), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile_(f, backend=counting, **how))
    prepare_compiler()
    yield counting
    _logprobs._fused.cache_clear()
    adamw._compiled_update.cache_clear()


@pytest.mark.parametrize(
    ("kept", "cap"),
    [(0, None), (40, None), (500, None), (40, 5.0)],
    ids=["computed again", "some kept", "all kept", "capped"],
)
def test_fused_logits_give_the_log_probabilities_entropies_and_gradients_of_the_others(kept, cap, counter, monkeypatch):
    monkeypatch.setattr("offbeat_training._logprobs.KEPT_BYTES", kept * 300 * 2)
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 30 * 300 * 4)

    def differentiate(num_tokens, fused):
        draw = torch.Generator().manual_seed(num_tokens)
        leaves = [torch.randn(n, 64, generator=draw).requires_grad_() for n in (num_tokens, 300)]
        target = torch.randint(300, (num_tokens,), generator=draw)
        more = {"scale": 0.7, "cap": cap, "gradient_dtype": torch.bfloat16}
        found = token_logprobs(*leaves, None, target, fused=fused, **more)
        weight = torch.randn(num_tokens, generator=draw)
        return torch.stack(found), torch.autograd.grad((found[0] * weight).sum(), leaves)

    for num_tokens in (200, 131, 94, 77):
        (found, gradients), (wanted, exact) = (differentiate(num_tokens, fused) for fused in (True, False))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        for one, other in zip(gradients, exact, strict=True):
            assert (one - other).norm() < 2e-3 * other.norm(), "a last bit of bfloat16 differs here and there"
    assert counter.frame_count <= 3, "chunks that are kept, and chunks that are not, forward and backward"


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_fused_updates_of_narrow_moments_give_the_weights_of_the_others(moments, counter, monkeypatch):
    monkeypatch.setattr("offbeat_training._optimizers.moments.CHUNK_ELEMENTS", 20_000)
    config = TrainEngineConfig(model_path="unused", learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)
    shapes = {"a": (100, 300), "b": (70, 576), "experts": (6, 30, 64), "small": (8, 8)}

    def train(*, fused):
        draw = torch.Generator().manual_seed(0)
        parameters = {name: torch.nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}
        optimizer = ClippedAdamW(parameters, config, moments=moments, fused=fused)
        for _ in range(4):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step(1.0)
        return parameters

    found, wanted = train(fused=True), train(fused=False)
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-5, msg=name)
    assert counter.frame_count <= 3, "not one for each shape, rate or step"
