import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat_training import VocabularyPart, _logprobs, logprobs_of_logits, token_logprobs


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 16, 40], ids=["one token", "one chunk", "three chunks"])
@pytest.mark.parametrize("matmul_dtype", [torch.float64, None], ids=["rounded", "as they are"])
@pytest.mark.parametrize("kept", [0, 20, 100], ids=["computed again", "some kept", "all kept"])
@pytest.mark.parametrize("cap", [None, 1.5], ids=["uncapped", "capped"])
def test_log_probabilities_and_entropies_are_those_of_a_plain_softmax(
    num_tokens, entropy_gradient, matmul_dtype, kept, cap, monkeypatch
):
    """In float64, gradients included."""
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 1)
    monkeypatch.setattr("offbeat_training._logprobs.BLOCK_BYTES", 5 * 11 * 8)
    monkeypatch.setattr("offbeat_training._logprobs.KEPT_BYTES", kept * 11 * 8)
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    target, factor = torch.randint(11, (num_tokens,)), torch.randn(2, num_tokens, dtype=torch.float64)
    logits = hidden @ weight.T + bias
    logp = torch.log_softmax(0.5 * (logits if cap is None else cap * torch.tanh(logits / cap)), -1)
    wanted = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    loss = (wanted[0] * factor[0]).sum() + ((wanted[1] * factor[1]).sum() if entropy_gradient else 0.0)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    options = {"scale": 0.5, "cap": cap, "matmul_dtype": matmul_dtype, "entropy_gradient": entropy_gradient}
    found = token_logprobs(hidden, weight, bias, target, **options)
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted))
    ((found[0] * factor[0]).sum() + (found[1] * factor[1]).sum()).backward()
    torch.testing.assert_close((hidden.grad, weight.grad, bias.grad), gradients)


def test_logits_of_bfloat16_weights_are_not_rounded():
    """Products of what is in bfloat16 already are added up in float32, unless a format is asked for."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    target = torch.randint(300, (20,))
    wanted = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, target[:, None])[:, 0]
    exact = token_logprobs(hidden, weight, None, target, matmul_dtype=None)[0]
    rounded = token_logprobs(hidden, weight, None, target, matmul_dtype=torch.bfloat16)[0]
    torch.testing.assert_close(exact.double(), wanted, atol=1e-5, rtol=1e-5)
    assert (rounded.double() - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("kept", [0, 40, 200], ids=["computed again", "some kept", "all kept"])
def test_gradients_of_bfloat16_factors_stay_within_half_a_percent(kept, monkeypatch):
    """Of the float64 gradient's norm; log-probabilities and entropies are those of float32 to the bit.

    Each factor is rounded to 8 bits, 0.2 % at most, and so is each product before it is added up.
    """
    monkeypatch.setattr("offbeat_training._logprobs.KEPT_BYTES", kept * 300 * 2)
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 30 * 300 * 4)
    monkeypatch.setattr("offbeat_training._logprobs.PRODUCT_ROWS", 128)
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(200, 64), torch.randn(300, 64), torch.randint(300, (200,))
    target[::2] = (hidden @ weight.T).argmax(1)[::2]  # probabilities near 1: their gradients are small differences
    factor = torch.randn(200)

    def differentiate(dtype, **formats):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        found = token_logprobs(*leaves, None, target, **formats)
        return found, torch.autograd.grad((found[0] * factor).sum(), leaves)

    exact = differentiate(torch.float64, matmul_dtype=torch.float64)[1]
    plain = differentiate(torch.float32)[0]
    found, gradients = differentiate(torch.float32, gradient_dtype=torch.bfloat16)
    assert torch.equal(torch.stack(found), torch.stack(plain))
    for gradient, wanted in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - wanted).norm() < 0.005 * wanted.norm()


def test_no_more_is_kept_for_the_backward_pass_than_agreed(monkeypatch):
    """And nothing where gradient flows through the entropy, which needs more."""
    monkeypatch.setattr("offbeat_training._logprobs.KEPT_BYTES", 16 * 300 * 4)
    hidden, weight = torch.randn(200, 8, requires_grad=True), torch.randn(300, 8, requires_grad=True)
    target, kept = torch.randint(300, (200,)), []
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 16 * 300 * 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        token_logprobs(hidden, weight, None, target)
        assert (16, 300) in kept
        assert max(size.numel() for size in kept) == 16 * 300
        kept.clear()
        token_logprobs(hidden, weight, None, target, entropy_gradient=True)
    assert max(size.numel() for size in kept) == weight.numel()


def test_log_probabilities_of_logits_at_hand_are_those_of_a_plain_softmax():
    torch.manual_seed(0)
    logits, target = 9 * torch.randn(7, 12, dtype=torch.float64), torch.randint(12, (7,))
    wanted = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprobs_of_logits(logits, target), wanted)


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("kept", [0, 16, 100], ids=["computed again", "some kept", "all kept"])
@pytest.mark.parametrize("adds_gradient", [True, False], ids=["added up", "left to the caller"])
@pytest.mark.parametrize("cap", [None, 1.5], ids=["uncapped", "capped"])
def test_ranks_that_share_the_vocabulary_find_what_one_finds(entropy_gradient, kept, adds_gradient, cap, monkeypatch):
    """Two parts in one process: each adds up over both what the other has found in a pass before."""
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 1)
    monkeypatch.setattr("offbeat_training._logprobs.KEPT_BYTES", kept * 6 * 8)
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 8, dtype=torch.float64), torch.randn(12, 8, dtype=torch.float64)
    target, factor = torch.randint(12, (40,)), torch.randn(2, 40, dtype=torch.float64)
    options = {"matmul_dtype": torch.float64, "entropy_gradient": entropy_gradient, "cap": cap}

    def differentiate(rows, part=None):
        leaves = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
        found = token_logprobs(*leaves, None, target, part=part, **options)
        return [*found, *torch.autograd.grad((torch.stack(found) * factor).sum(), leaves)]

    wanted = differentiate(slice(None))
    meeting = threading.Barrier(2, timeout=10)
    shared: list[torch.Tensor | None] = [None, None]

    def exchange(rank, tensor, join):
        shared[rank] = tensor.clone()
        meeting.wait()
        joined = join(*shared)
        meeting.wait()
        return tensor.copy_(joined)

    def be(rank):
        part = VocabularyPart(
            first=6 * rank,
            add=lambda tensor: exchange(rank, tensor, torch.add),
            largest=lambda tensor: exchange(rank, tensor, torch.maximum),
            adds_gradient=adds_gradient,
        )
        return differentiate(slice(6 * rank, 6 * rank + 6), part)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(be, range(2)))
    for logprobs, entropy, grad_hidden, _ in found:
        whole = grad_hidden if adds_gradient else found[0][2] + found[1][2]
        torch.testing.assert_close([logprobs, entropy, whole], wanted[:3])
    torch.testing.assert_close(torch.cat([grad_weight for *_, grad_weight in found]), wanted[3])


def test_ranks_that_share_the_vocabulary_find_what_one_finds_in_logits_at_hand():
    torch.manual_seed(0)
    logits, target = 9 * torch.randn(7, 12, dtype=torch.float64), torch.randint(12, (7,))
    parts = logits.split(6, 1)
    wanted = logprobs_of_logits(logits, target)
    columns = torch.arange(7), target % 6
    chosen = [torch.where(target // 6 == rank, each[columns], 0.0) for rank, each in enumerate(parts)]
    top = torch.maximum(*(each.logsumexp(1) for each in parts))
    total = sum((each.logsumexp(1) - top).exp() for each in parts)
    for rank, own in enumerate(parts):
        added = []

        def add(tensor, added=added):
            added.append(tensor.clone())
            return torch.stack([chosen[0] + chosen[1], total])

        part = VocabularyPart(first=6 * rank, add=add, largest=lambda tensor: torch.maximum(tensor, top))
        torch.testing.assert_close(logprobs_of_logits(own, target, part), wanted)
        torch.testing.assert_close(added, [torch.stack([chosen[rank], (own.logsumexp(1) - top).exp()])])


@pytest.mark.parametrize("matmul_dtype", [torch.bfloat16, None], ids=["rounded factors", "as they are"])
def test_logits_of_bfloat16_factors_are_not_rounded_where_products_can_be_wide(matmul_dtype):
    """On tensors that have a device and no memory: none of this machine has such products."""
    with FakeTensorMode(), OperationNames() as names:
        weight = torch.empty(300, 64, device="cuda", dtype=torch.bfloat16 if matmul_dtype is None else torch.float32)
        formats = _logprobs._Formats(matmul_dtype, torch.bfloat16, torch.float32)
        head = _logprobs._Head(weight, None, 1.0, formats, fused=True)
        names.clear()
        logits = head.logits(torch.empty(7, 64, device="cuda", dtype=torch.bfloat16))
    assert (logits.dtype, logits.shape) == (torch.float32, (7, 300))
    assert [name for name in names if name in ("mm", "copy_", "_to_copy")] == ["mm"]


class OperationNames(TorchDispatchMode, list):
    """Names of operations, as they are called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
