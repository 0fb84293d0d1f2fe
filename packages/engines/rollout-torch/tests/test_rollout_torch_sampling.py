"""Drawing against a slow reference in float64, and the distribution that comes out."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat_core import SamplingParams
from offbeat_rollout_torch import _sampling
from offbeat_rollout_torch._sampling import block_sums, cut_distribution, draw, invert, uniforms


def slow_cut(probs, params):
    """top_k, then top_p of what is left, then min_p, one row at a time."""
    order = np.argsort(-probs, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    running, chosen, mass = 0.0, [], probs[kept].sum()
    for token in kept:
        if params.top_p < 1 and running / mass >= params.top_p:
            break
        chosen.append(token)
        running += probs[token]
    chosen = [token for token in chosen if probs[token] >= params.min_p * probs.max()]
    out = np.zeros_like(probs)
    out[chosen] = probs[chosen] / probs[chosen].sum()
    return out


cuts = st.builds(
    SamplingParams,
    top_k=st.sampled_from([0, 1, 3, 20, 299, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
)


@settings(max_examples=60)
@example(params=[SamplingParams(top_k=3), SamplingParams(top_k=20), SamplingParams(top_k=1)], seed=0, spread=1)
@given(params=st.lists(cuts, min_size=1, max_size=4), seed=st.integers(0, 1000), spread=st.sampled_from([0.1, 1, 5]))
def test_cuts_are_those_of_the_definition(params, seed, spread):
    """Also where the first candidates do not reach: 8, then 30 of 300 here."""
    logits = np.random.default_rng(seed).normal(size=(len(params), 300)) * spread
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    before = _sampling.CANDIDATES
    _sampling.CANDIDATES = (8, 30)
    try:
        got = cut_distribution(torch.from_numpy(probs).float(), params).numpy()
    finally:
        _sampling.CANDIDATES = before
    for row, p, one in zip(got, probs, params, strict=True):
        expected = slow_cut(p, one)
        # A token on the very edge of top_p may fall on either side in float32.
        differs = (row > 0) != (expected > 0)
        assert differs.sum() <= (one.top_p < 1)
        if not differs.any():
            np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.5, 1), (0.25, 1), (0.75, 2), (0.875, 3), (0.5 + 2**-20, 2), (1.0, 4)]
)
def test_the_smallest_set_that_reaches_top_p_is_kept_where_a_sum_meets_it_exactly(top_p, num_kept):
    """Powers of 2 add up without rounding."""
    got = cut_distribution(torch.tensor([[0.5, 0.25, 0.125, 0.125]]), [SamplingParams(top_p=top_p)])
    assert (got > 0).sum() == num_kept
    assert got.sum() == pytest.approx(1.0)


@settings(max_examples=100)
@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=5), st.integers(0, 10**6))
def test_uniforms_are_in_range_and_depend_only_on_seed_and_count(seeds, count):
    together = uniforms(seeds, [count] * len(seeds))
    assert ((together > 0) & (together < 1)).all()
    for seed, number in zip(seeds, together, strict=True):
        assert uniforms([seed], [count])[0] == number


def test_the_smallest_uniform_does_not_draw_a_token_that_is_as_good_as_impossible():
    """Such as token 0, which comes first in the running sum."""
    # SplitMix64 maps the negative of its increment to 0, and the count is free to make that of any seed.
    count = int(_sampling._mix(np.asarray([7], np.uint64))[0]) ^ (-0x9E3779B97F4A7C15 % 2**64)
    smallest = uniforms([7], [count])
    assert 0 < smallest[0] <= 2.0**-22
    logits = torch.zeros(1, 8)
    logits[0, 0] = -40.0
    drawn = draw(logits, [SamplingParams()], smallest)
    assert drawn.ids == [1]
    assert drawn.logprobs[0] == pytest.approx(-np.log(7), abs=1e-5)


def test_uniforms_are_uniform_and_neighbours_are_not_related():
    numbers = uniforms([s for s in range(100) for _ in range(200)], [t for _ in range(100) for t in range(200)])
    table = numbers.view(100, 200).double()
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # chi-square, 19 degrees of freedom, p = 0.0007
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.03


def test_invert_draws_each_token_as_often_as_its_probability():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]])
    numbers = (torch.arange(10000) + 0.5) / 10000
    drawn = torch.cat([invert(probs, block_sums(probs), u[None]) for u in numbers[::10]]).flatten()
    share = torch.bincount(drawn, minlength=6) / len(drawn)
    torch.testing.assert_close(share, probs[0], atol=2e-3, rtol=0)
    largest = torch.tensor([1 - 2.0**-23])
    assert invert(probs, block_sums(probs), largest).item() == 4
    assert invert(probs, block_sums(probs), torch.zeros(1)).item() == 1


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 5000, 49152])
@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_invert_finds_the_token_of_the_running_sum(vocabulary, spread):
    """To within float32's rounding of a float64 sum over all tokens."""
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(torch.randn(20, vocabulary, generator=generator) * spread, -1)
    numbers = uniforms(range(20), [0] * 20)
    drawn = invert(probs, block_sums(probs), numbers)
    after = torch.cumsum(probs.double(), -1)
    total, after = after[:, -1], after.gather(-1, drawn)[:, 0]
    chosen = probs.gather(-1, drawn)[:, 0].double()
    assert (chosen > 0).all()
    assert (after - chosen - 1e-5 <= numbers * total).all()
    assert (numbers * total <= after + 1e-5).all()


def test_a_row_of_high_entropy_does_not_have_the_others_sorted(monkeypatch):
    sorted_rows = []
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda p, k: (sorted_rows.extend([k] * len(p)), topk(p, k))[1])
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)) * 8
    logits[3] = 0.0
    cut_distribution(torch.softmax(logits, -1), [SamplingParams(top_p=0.9)] * 8)
    assert sorted_rows.count(5000) == 1


def test_a_running_sum_that_is_not_monotone_draws_no_token_of_probability_zero(monkeypatch):
    """As CUDA's, whose last bits depend on how the sum was split."""
    cumsum = torch.cumsum

    def rough(probs, dim):
        noise = torch.rand(probs.shape, generator=torch.Generator().manual_seed(0)) - 0.5
        return cumsum(probs, dim) + noise * 1e-2

    monkeypatch.setattr(torch, "cumsum", rough)
    probs = torch.zeros(4000, 50)
    probs[:, [7, 8, 30]] = torch.tensor([0.3, 0.3, 0.4])
    drawn = invert(probs, block_sums(probs), (torch.arange(4000) + 0.5) / 4000)[:, 0]
    assert set(drawn.tolist()) == {7, 8, 30}
    share = torch.bincount(drawn, minlength=50)[[7, 8, 30]] / 4000
    torch.testing.assert_close(share, probs[0, [7, 8, 30]], atol=0.02, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_whole_logprobs_are_those_before_the_cut(temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    kinds = [{"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}, {}]
    params = [SamplingParams(temperature=temperature, whole_logprobs=i != 2, **kind) for i, kind in enumerate(kinds)]
    drawn = draw(logits.clone(), params, torch.tensor([0.3, 0.9, 0.5]))
    whole = torch.log_softmax(logits / temperature, -1)
    for row, token, logprob in zip(whole, drawn.ids, drawn.logprobs, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_distribution_drawn_from(temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=5),
        SamplingParams(temperature=0.0, top_k=1),
    ]
    drawn = draw(logits.clone(), params, torch.tensor([0.3, 0.9, 0.5]))
    cold = torch.softmax(logits / temperature, -1).double().numpy()
    rows = [cold[0], slow_cut(cold[1], params[1]), torch.softmax(logits[2], -1).numpy()]
    for row, token, logprob in zip(rows, drawn.ids, drawn.logprobs, strict=True):
        assert logprob == pytest.approx(np.log(row[token]), abs=1e-5)
    assert drawn.ids[2] == int(logits[2].argmax())


def test_a_row_that_is_not_finite_shows_in_its_logprob():
    logits = torch.full((1, 8), float("nan"))
    drawn = draw(logits, [SamplingParams()], torch.tensor([0.5]))
    assert not np.isfinite(drawn.logprobs[0])
