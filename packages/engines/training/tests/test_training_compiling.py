"""Compiled functions are kept safely, and compute the same."""

import os
import shutil
import stat

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from offbeat_training import _compiling, _logprobs, compiled, prepare_compiler, token_logprobs

NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=[pytest.mark.nightly, NEEDS_COMPILER])])
def counter(request, monkeypatch, tmp_path):
    """Count graphs; by day they run without generated code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    _logprobs._fused.cache_clear()
    counting, compile_ = CompileCounterWithBackend(request.param), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **how: compile_(f, backend=counting, **how))
    prepare_compiler()
    yield counting
    _logprobs._fused.cache_clear()


@pytest.mark.parametrize("kept", [0, 40, 500], ids=["computed again", "some kept", "all kept"])
def test_fused_logits_give_the_log_probabilities_entropies_and_gradients_of_the_others(kept, counter, monkeypatch):
    monkeypatch.setattr("offbeat_training._logprobs.KEPT_BYTES", kept * 300 * 2)
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 30 * 300 * 4)

    def differentiate(num_tokens, fused):
        draw = torch.Generator().manual_seed(num_tokens)
        leaves = [torch.randn(n, 64, generator=draw).requires_grad_() for n in (num_tokens, 300)]
        target = torch.randint(300, (num_tokens,), generator=draw)
        found = token_logprobs(*leaves, None, target, scale=0.7, gradient_dtype=torch.bfloat16, fused=fused)
        weight = torch.randn(num_tokens, generator=draw)
        return torch.stack(found), torch.autograd.grad((found[0] * weight).sum(), leaves)

    for num_tokens in (200, 131, 94, 77):
        (found, gradients), (wanted, exact) = (differentiate(num_tokens, fused) for fused in (True, False))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        for one, other in zip(gradients, exact, strict=True):
            assert (one - other).norm() < 2e-3 * other.norm(), "a last bit of bfloat16 differs here and there"
    assert counter.frame_count <= 3, "chunks that are kept, and chunks that are not, forward and backward"


def test_compiled_code_is_kept_where_the_user_alone_can_write(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepare_compiler()
    folder = tmp_path / "offbeat" / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_to_does_not_forbid_compiling(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    monkeypatch.setattr(_compiling.tempfile, "tempdir", str(tmp_path))
    prepare_compiler()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path / "offbeat-compiled-"))


@NEEDS_COMPILER
def test_no_pickles_are_written(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    assert torch.equal(compiled(lambda x: x * 2 + 1)(torch.ones(3)), torch.full((3,), 3.0))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} <= {".py", ".cpp", ".so", ".h", ".gch", ".lock"}, "pickles would be read"
