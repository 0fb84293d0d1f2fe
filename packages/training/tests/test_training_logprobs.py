import pytest
import torch

from offbeat_training import token_logprobs


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 16, 40], ids=["one token", "one chunk", "three chunks"])
@pytest.mark.parametrize("matmul_dtype", [torch.float64, None], ids=["rounded", "as they are"])
def test_log_probabilities_and_entropies_are_those_of_a_plain_softmax(
    num_tokens, entropy_gradient, matmul_dtype, monkeypatch
):
    """In float64, gradients included."""
    monkeypatch.setattr("offbeat_training._logprobs.CHUNK_BYTES", 1)
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    target, factor = torch.randint(11, (num_tokens,)), torch.randn(2, num_tokens, dtype=torch.float64)
    logp = torch.log_softmax(0.5 * (hidden @ weight.T + bias), -1)
    wanted = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    loss = (wanted[0] * factor[0]).sum() + ((wanted[1] * factor[1]).sum() if entropy_gradient else 0.0)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    options = {"scale": 0.5, "matmul_dtype": matmul_dtype, "entropy_gradient": entropy_gradient}
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
