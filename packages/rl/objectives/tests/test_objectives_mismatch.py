"""The mismatch of trainer and rollout engine against loops over tokens in float64, however an update is divided."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import Metric, merge_metrics
from offbeat_objectives import summarise_mismatch
from offbeat_objectives._mismatch import measure_mismatch

FIGURES = ("kl", "abs_p99_nats", "abs_max_nats", "ess_share")
BIN = 10 ** (1 / 32)
"""Ratio of two neighbouring edges of the histogram."""


@st.composite
def updates(draw):
    """Log-probabilities [N] of trainer and engine, flags [N], and the sizes of the micro-batches that N is cut into."""
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 1e-7, 1e-3, 0.3, 8.0, 500.0]))
    rollout_N = -3 * torch.rand(sum(sizes), generator=generator)
    train_N = rollout_N + spread * torch.randn(sum(sizes), generator=generator)
    lagged_N = (torch.rand(sum(sizes), generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))).float()
    return train_N, rollout_N, lagged_N, sizes


def reference(log_ratios):
    """The four figures of some tokens, the percentile exactly."""
    if not log_ratios:
        return None
    bounded = [max(-20.0, min(20.0, x)) for x in log_ratios]
    sizes = sorted(map(abs, log_ratios))
    ratios = [math.exp(x) for x in bounded]
    return {
        "kl": math.fsum(r - 1 - x for r, x in zip(ratios, bounded, strict=True)) / len(ratios),
        "abs_p99_nats": sizes[math.ceil(len(sizes) * 99 / 100) - 1],
        "abs_max_nats": sizes[-1],
        "ess_share": math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(r * r for r in ratios)),
    }


@settings(max_examples=150)
@given(update=updates(), num_ranks=st.integers(1, 3))
def test_the_figures_are_those_of_the_whole_update_however_it_is_divided(update, num_ranks):
    train_N, rollout_N, lagged_N, sizes = update
    parts = zip(*(values.split(sizes) for values in (train_N, rollout_N, lagged_N)), strict=True)
    micro_batches = [measure_mismatch(*part) for part in parts]
    ranks = [merge_metrics(micro_batches[rank::num_ranks]) for rank in range(num_ranks)]

    metrics = summarise_mismatch(merge_metrics(ranks))

    log_ratios = (train_N - rollout_N).double().tolist()
    chosen = {
        "": log_ratios,
        "_lag0": [x for x, lagged in zip(log_ratios, lagged_N.tolist(), strict=True) if not lagged],
        "_lagged": [x for x, lagged in zip(log_ratios, lagged_N.tolist(), strict=True) if lagged],
    }
    names = {"mismatch/lagged_share"}
    for suffix, tokens in chosen.items():
        expected = reference(tokens)
        if expected is None:
            continue
        names |= {f"mismatch/{figure}{suffix}" for figure in FIGURES}
        found = {figure: metrics[f"mismatch/{figure}{suffix}"].value for figure in FIGURES}
        exact = expected["abs_p99_nats"]
        # The last bin has no upper edge: beyond 1,000 nats the largest is what is known.
        beyond = found["abs_max_nats"] if exact >= 1000 else 0.0
        most = max(exact * BIN * (1 + 1e-9), min(1e-6, found["abs_max_nats"]), beyond)
        assert exact <= found["abs_p99_nats"] <= most
        for figure in ("kl", "abs_max_nats", "ess_share"):
            assert found[figure] == pytest.approx(expected[figure], rel=1e-9, abs=1e-13), figure
    assert set(metrics) == names
    assert metrics["mismatch/lagged_share"].value == pytest.approx(lagged_N.mean().item(), abs=1e-6)


@pytest.mark.parametrize("broken", [-math.inf, math.inf, math.nan])
def test_a_broken_log_probability_is_seen_and_leaves_the_other_figures_finite(broken):
    train_N = torch.tensor([-1.0, broken, -1.0])
    found = summarise_mismatch(measure_mismatch(train_N, torch.full((3,), -1.0), torch.zeros(3)))
    assert found["mismatch/abs_max_nats"].value == math.inf
    assert found["mismatch/abs_p99_nats_lag0"].value == math.inf
    assert math.isfinite(found["mismatch/kl"].value)
    assert 0 < found["mismatch/ess_share"].value <= 1


def test_without_lags_only_all_tokens_have_figures_and_other_metrics_pass():
    sums = measure_mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -10.0]))
    found = summarise_mismatch({"policy/entropy": Metric(value=2.0), **sums})
    assert set(found) == {"policy/entropy", *(f"mismatch/{figure}" for figure in FIGURES)}
    assert found["mismatch/abs_max_nats"].value == 8.0
    assert summarise_mismatch({"loss": Metric(value=1.0)}) == {"loss": Metric(value=1.0)}


@given(update=updates(), num_ranks=st.integers(1, 3), has_lags=st.booleans(), seed=st.integers(0, 99))
def test_tokens_whose_routes_agree_are_measured_apart_from_those_whose_routes_do_not(update, num_ranks, has_lags, seed):
    train_N, rollout_N, lagged_N, sizes = update
    differ_N = torch.randint(-1, 4, (sum(sizes),), generator=torch.Generator().manual_seed(seed)) / 3
    columns = (train_N, rollout_N, lagged_N, differ_N)
    parts = zip(*(values.split(sizes) for values in columns), strict=True)
    micro_batches = [
        measure_mismatch(train_n, rollout_n, lagged_n if has_lags else None, differ_n)
        for train_n, rollout_n, lagged_n, differ_n in parts
    ]
    metrics = summarise_mismatch(
        merge_metrics([merge_metrics(micro_batches[rank::num_ranks]) for rank in range(num_ranks)])
    )

    shares = differ_N.double().tolist()
    log_ratios = (train_N - rollout_N).double().tolist()
    chosen = {
        "": log_ratios,
        "_same_routes": [x for x, share in zip(log_ratios, shares, strict=True) if share == 0],
        "_other_routes": [x for x, share in zip(log_ratios, shares, strict=True) if share > 0],
    }
    for suffix, tokens in chosen.items():
        wanted = reference(tokens)
        assert (f"mismatch/kl{suffix}" in metrics) == (wanted is not None)
        if wanted is not None:
            assert metrics[f"mismatch/kl{suffix}"].value == pytest.approx(wanted["kl"], rel=1e-6, abs=1e-12)
            assert metrics[f"mismatch/abs_max_nats{suffix}"].value == pytest.approx(wanted["abs_max_nats"], rel=1e-6)
    known = [share for share in shares if share >= 0]
    assert ("mismatch/routes_differ" in metrics) == bool(known)
    if known:
        assert metrics["mismatch/routes_differ"].value == pytest.approx(math.fsum(known) / len(known), abs=1e-6)
