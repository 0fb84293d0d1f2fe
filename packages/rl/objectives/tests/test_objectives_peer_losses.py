"""clip_cov, kl_cov, gpg, DPPO and the off-policy mask against loops over tokens in float64, values and gradients."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_batches import AGGREGATIONS, batches, config_of, gradients, reference_divisors, sequences_of

from offbeat_objectives import build_loss
from offbeat_objectives._losses import find_objective
from offbeat_objectives._surrogates import PolicyTokens

OPTIONS = {
    "clip_cov": {"cov_share": 1.0, "cov_low": 0.05, "cov_high": 1.5},
    "kl_cov": {"cov_share": 0.3, "kl_weight": 0.7},
    "gpg": {},
    "dppo_tv": {"ratio_cap": 1.6},
    "dppo_kl": {"ratio_cap": 1.6},
}
CLIPS = {
    "clip_cov": {"clip_low": 0.1, "clip_high": 0.3},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.05},
    "dppo_kl": {"clip_low": 0.002, "clip_high": 0.01},
}


def peer_config(loss, aggregation="token_mean", **options):
    return config_of(loss, aggregation, options=OPTIONS[loss] | options, **CLIPS.get(loss, {}))


def covariances(kept, new, advantages):
    mean_a = sum(advantages[n] for n in kept) / max(len(kept), 1)
    mean_l = sum(new[n] for n in kept) / max(len(kept), 1)
    return {n: (advantages[n] - mean_a) * (new[n] - mean_l) for n in kept}


def is_a_tie(tokens, config):
    """Whether rounding decides which tokens have the largest covariances: of two tokens both always have the same."""
    keep = tokens.extras["keep"].tolist()
    kept = [n for n in range(len(keep)) if keep[n]]
    cov = sorted(covariances(kept, tokens.logprobs_N.tolist(), tokens.extras["advantages"].tolist()).values())
    num_most = max(int(config.options.get("cov_share", 0) * len(kept)), 1)
    return num_most < len(kept) and cov[-num_most] - cov[-num_most - 1] < 1e-12


def reference_objectives(tokens, config):
    """(objective, d objective / d its own log-probability) of each kept token, by hand."""
    keep, advantages = tokens.extras["keep"].tolist(), tokens.extras["advantages"].tolist()
    new, old = tokens.logprobs_N.tolist(), tokens.extras["old_logprobs"].tolist()
    kept, options = [n for n in range(len(new)) if keep[n]], config.options
    cov = covariances(kept, new, advantages)
    most = sorted(kept, key=lambda n: -cov[n])[: max(int(options.get("cov_share", 0) * len(kept)), 1)]
    result = {}
    for n in kept:
        a, log_r, r = advantages[n], new[n] - old[n], math.exp(new[n] - old[n])
        if config.loss == "gpg":
            result[n] = a * new[n], a
        elif config.loss == "kl_cov":
            held = options["kl_weight"] if n in most else 0.0
            result[n] = r * a - held * abs(log_r), r * a - held * math.copysign(1.0, log_r)
        elif config.loss == "clip_cov":
            low, high = 1 - config.clip_low, 1 + config.clip_high
            is_clipped = (a > 0 and r > high) or (a < 0 and r < low)
            is_chosen = not is_clipped and options["cov_low"] < cov[n] < options["cov_high"]
            bounded = min(max(r, low), high)
            result[n] = (0.0, 0.0) if is_chosen else (min(r * a, bounded * a), 0.0 if is_clipped else r * a)
        else:
            p, q = math.exp(old[n]), math.exp(new[n])
            gap = abs(p - q)
            if config.loss == "dppo_kl":
                gap = p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
            is_masked = (q > p and gap > config.clip_high) if a > 0 else (q < p and gap > config.clip_low)
            slope = 0.0 if is_masked else min(r, options["ratio_cap"]) * a
            result[n] = slope * new[n], slope
    return result


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", list(OPTIONS))
@settings(max_examples=25)
@given(tokens=batches(token_advantages=True))
def test_a_loss_of_the_peers_is_the_formula_of_its_paper(loss, aggregation, tokens):
    config = peer_config(loss, aggregation)
    assume(loss != "kl_cov" or not is_a_tie(tokens, config))
    value, _ = build_loss(config)(tokens)
    gradient_N, _ = gradients(value, tokens)

    weights, divisors = tokens.extras["correction_weights"].tolist(), reference_divisors(tokens, config)
    expected, expected_N = 0.0, torch.zeros_like(gradient_N)
    for n, (objective, slope) in reference_objectives(tokens, config).items():
        expected -= objective * weights[n] / divisors[n]
        expected_N[n] = -slope * weights[n] / divisors[n]
    assert value.item() == pytest.approx(expected, rel=1e-7, abs=1e-10)
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-7, atol=1e-10)


def policy_tokens(tokens):
    keep_N = tokens.extras["keep"]
    return PolicyTokens(
        logprobs_N=tokens.logprobs_N.masked_fill(keep_N == 0, 0.0),
        old_N=tokens.extras["old_logprobs"].masked_fill(keep_N == 0, 0.0),
        advantages_N=tokens.extras["advantages"],
        keep_N=keep_N,
        sequence_N=tokens.sequence_N,
        num_sequences=tokens.num_sequences,
    )


@settings(max_examples=60)
@given(tokens=batches(token_advantages=True, max_length=20), share=st.sampled_from([1e-4, 0.1, 0.3]))
def test_clip_cov_takes_its_share_of_the_candidates_and_the_same_ones_on_every_rank(tokens, share):
    every, some = peer_config("clip_cov"), peer_config("clip_cov", cov_share=share)
    policy = policy_tokens(tokens)
    candidates_N = find_objective(every)(policy, every).metrics_N["clip_cov"]
    found = [find_objective(some)(policy, some) for _ in range(2)]
    chosen_N = found[0].metrics_N["clip_cov"]
    num_kept = int(tokens.extras["keep"].sum())
    assert not bool((chosen_N & ~candidates_N).any())
    assert int(chosen_N.sum()) == min(max(int(share * num_kept), 1), int(candidates_N.sum()))
    assert torch.equal(chosen_N, found[1].metrics_N["clip_cov"])


@settings(max_examples=60)
@given(
    tokens=batches(token_advantages=True), bound=st.sampled_from([1e-3, 0.1, 1.0]), loss=st.sampled_from(list(OPTIONS))
)
def test_the_off_policy_mask_takes_sequences_that_have_drifted_out_of_the_objective_alone(tokens, bound, loss):
    plain = replace(peer_config(loss), kl_coefficient=0.3, kl_ratio_weight=False)
    config = replace(plain, options=plain.options | {"off_policy_mask": bound})
    assume(loss != "kl_cov" or not is_a_tie(tokens, config))
    assert "rollout_logprobs" in build_loss(config).required_extras
    value, metrics = build_loss(config)(tokens)
    gradient_N, _ = gradients(value, tokens)

    keep, advantages = tokens.extras["keep"].tolist(), tokens.extras["advantages"].tolist()
    gaps = (tokens.extras["rollout_logprobs"] - tokens.logprobs_N).tolist()
    masked = set()
    for members in sequences_of(tokens):
        kept = [n for n in members if keep[n]]
        if kept and sum(gaps[n] for n in kept) / len(kept) > bound:
            masked |= {n for n in kept if advantages[n] < 0}
    weights, divisors = tokens.extras["correction_weights"].tolist(), reference_divisors(tokens, config)
    _, unmasked = build_loss(plain)(tokens)
    expected, expected_N = unmasked["loss/kl"].value, torch.zeros_like(gradient_N)
    for n, (objective, slope) in reference_objectives(tokens, config).items():
        x = (tokens.extras["ref_logprobs"][n] - tokens.logprobs_N[n]).item()
        expected_N[n] = 0.3 * (1 - math.exp(x)) / divisors[n]
        if n not in masked:
            expected -= objective * weights[n] / divisors[n]
            expected_N[n] -= slope * weights[n] / divisors[n]
    assert value.item() == pytest.approx(expected, rel=1e-7, abs=1e-10)
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-7, atol=1e-10)
    if any(keep):
        assert metrics["objective/off_policy_mask"].value == pytest.approx(len(masked) / sum(keep))
        assert metrics["objective/off_policy_mask"].weight == sum(keep)


@pytest.mark.parametrize("loss", list(OPTIONS))
@settings(max_examples=20)
@given(tokens=batches(token_advantages=True), value=st.floats(-5, -0.1))
def test_what_rejected_tokens_hold_changes_nothing(loss, tokens, value):
    function = build_loss(peer_config(loss))
    is_kept_N = tokens.extras["keep"] > 0
    other = replace(
        tokens,
        logprobs_N=torch.where(is_kept_N, tokens.logprobs_N.detach(), value).requires_grad_(),
        extras={name: torch.where(is_kept_N, values_N, value) for name, values_N in tokens.extras.items()}
        | {"keep": tokens.extras["keep"]},
    )
    (first, _), (second, _) = function(tokens), function(other)
    assert first.item() == second.item()
    assert torch.equal(gradients(first, tokens)[0], gradients(second, other)[0])


@settings(max_examples=20)
@given(tokens=batches(token_advantages=True))
def test_dppo_masks_nothing_on_the_old_policy(tokens):
    same = replace(tokens, extras=tokens.extras | {"old_logprobs": tokens.logprobs_N.detach().clone()})
    for loss in ("dppo_tv", "dppo_kl"):
        _, metrics = build_loss(peer_config(loss))(same)
        assert "objective/ratio_capped" in metrics or not tokens.extras["keep"].any()
        measured = [
            name for name in metrics if name in ("policy/clip_low", "policy/clip_high", "objective/ratio_capped")
        ]
        assert all(metrics[name].value == 0.0 for name in measured)
