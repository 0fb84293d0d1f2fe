"""Packing, KL estimators, filters and the public surface."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat_objectives
from offbeat_core import ConfigError, DataError, ShapeError
from offbeat_objectives import has_signal, kl_per_token, overlong_penalty, pack, sequence_of_tokens, unpack


@settings(max_examples=50)
@given(mask=st.integers(0, 5).flatmap(lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1)))
def test_packing_keeps_every_token_and_its_row(mask):
    mask_BT = torch.tensor(mask, dtype=torch.bool).reshape(len(mask), -1)
    values_BT = torch.arange(mask_BT.numel()).reshape(mask_BT.shape).float()
    packed = pack(mask_BT, values_BT, values_BT + 1)
    expected = [(b, values_BT[b, t].item()) for b, row in enumerate(mask) for t, chosen in enumerate(row) if chosen]
    assert list(zip(packed.sequence_N.tolist(), packed.tensors[0].tolist(), strict=True)) == expected
    assert packed.num_sequences == len(mask)
    assert torch.equal(unpack(mask_BT, packed.tensors[0], fill=-7.0), values_BT.masked_fill(~mask_BT, -7.0))
    assert torch.equal(sequence_of_tokens(mask_BT.sum(1)), packed.sequence_N)


def test_shapes_that_differ_are_refused():
    mask_BT = torch.ones(2, 3)
    with pytest.raises(ShapeError, match=r"\(2, 4\)"):
        pack(mask_BT, torch.ones(2, 4))
    with pytest.raises(ShapeError, match="6: got"):
        unpack(mask_BT, torch.ones(5))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_unbiased_estimator_has_the_divergence_as_its_mean(estimator):
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl_per_token(p.log(), q.log(), estimator)).sum(), expected)


def test_the_gradients_of_the_estimators_are_what_the_documentation_says():
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    log_p = logits.log_softmax(0)
    p = log_p.exp().detach()

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    sampled = {name: gradient((p * kl_per_token(log_p, log_q, name)).sum()) for name in ("k1", "k2", "k3")}
    torch.testing.assert_close(sampled["k1"], torch.zeros_like(p))
    torch.testing.assert_close(sampled["k2"], gradient((log_p.exp() * (log_p - log_q)).sum()))
    torch.testing.assert_close(sampled["k3"], gradient((log_q.exp() * (log_q - log_p)).sum()))


def test_k3_keeps_its_digits_for_policies_that_almost_agree():
    got = kl_per_token(torch.tensor([0.0]), torch.tensor([1e-3]), "k3").item()
    assert got == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_the_overlong_penalty_grows_over_the_buffer():
    lengths = [0, 80, 90, 95, 100, 120]
    got = [overlong_penalty(length, max_tokens=100, buffer_tokens=20, factor=2.0) for length in lengths]
    assert got == pytest.approx([0, 0, -1, -1.5, -2, -2])
    for buffer_tokens in (0, 101):
        with pytest.raises(ConfigError, match="between 1 and"):
            overlong_penalty(1, max_tokens=100, buffer_tokens=buffer_tokens)


def test_a_group_has_signal_when_its_rewards_differ():
    assert has_signal([0.0, 1.0, 0.0])
    assert not has_signal([1.0, 1.0])
    assert not has_signal([0.1 + 0.2, 0.3])
    assert not has_signal([0.7])
    assert not has_signal([])
    assert has_signal(torch.tensor([0.0, 0.5]))
    with pytest.raises(DataError, match="finite"):
        has_signal([0.0, math.nan])


def test_reading_and_checking_settings_imports_no_torch():
    program = (
        "import sys; from offbeat_objectives import AlgorithmConfig, check_algorithm, has_signal, overlong_penalty;"
        "check_algorithm(AlgorithmConfig(), samples_per_prompt=4); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(offbeat_objectives, name) for name in offbeat_objectives.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lost'"):
        _ = offbeat_objectives.lost
