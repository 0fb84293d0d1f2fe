"""Every policy loss against a loop over tokens in float64 written from the papers, values and gradients."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import (
    AGGREGATIONS,
    BY_TOKEN_OR_SEQUENCE,
    LOSSES,
    batches,
    config_of,
    gradients,
    reference_divisors,
    sequences_of,
)

from offbeat_core import LossTokens, ShapeError, merge_metrics
from offbeat_objectives import AlgorithmConfig, build_loss, check_algorithm, correct_rollouts, kl_per_token, sft_loss
from offbeat_objectives._config.algorithm import CORRECTIONS
from offbeat_objectives._divergence import weighted_kl


def clip(x, low, high):
    return min(max(x, low), high)


def reference_objectives(tokens, config):
    """(objective, d objective / d its own log-probability) of each kept token, by hand."""
    low, high = config.clip_range() if config.loss != "sapo" else (None, None)
    keep, advantages = tokens.extras["keep"].tolist(), tokens.extras["advantages"].tolist()
    new = tokens.logprobs_N.tolist()
    log_r = [a - b for a, b in zip(new, tokens.extras["old_logprobs"].tolist(), strict=True)]
    result = {}
    for members in sequences_of(tokens):
        kept = [n for n in members if keep[n]]
        for n in kept:
            a, r = advantages[n], math.exp(log_r[n])
            if config.loss == "ppo_clip":
                value = min(r * a, clip(r, 1 - low, 1 + high) * a)
                slope = 0.0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else r * a
                if config.dual_clip and a < 0 and r > config.dual_clip:
                    value, slope = config.dual_clip * a, 0.0
            elif config.loss == "gspo":
                s = math.exp(sum(log_r[k] for k in kept) / len(kept))
                value = min(s * a, clip(s, 1 - low, 1 + high) * a)
                slope = 0.0 if (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low) else s * a
            elif config.loss == "cispo":
                slope = clip(r, 1 - low, 1 + high) * a
                value = slope * new[n]
            elif config.loss == "sapo":
                tau = 1.3 if a > 0 else 2.1
                gate = 1 / (1 + math.exp(-tau * (r - 1)))
                value, slope = 4 / tau * gate * a, 4 * gate * (1 - gate) * r * a
            else:
                c = [min(log_r[k], high) if a > 0 else max(log_r[k], -low) for k in kept]
                value = a * math.exp(sum(c) / len(kept))
                slope = 0.0 if (a > 0 and log_r[n] > high) or (a < 0 and log_r[n] < -low) else value
            result[n] = (value, slope)
    return result


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "sapo", "gmpo", "dual_clip", "clip_higher"])
@settings(max_examples=25)
@given(data=st.data())
def test_a_loss_is_the_formula_of_its_paper(loss, aggregation, data):
    changes = {"dual_clip": {"dual_clip": 1.5}, "clip_higher": {"clip_low": 0.1, "clip_high": 0.4}}.get(loss, {})
    config = config_of(loss if loss in LOSSES else "ppo_clip", aggregation, **changes)
    tokens = data.draw(batches(token_advantages=loss in ("ppo_clip", "cispo", "sapo")))

    value, _ = build_loss(config)(tokens)
    gradient_N, _ = gradients(value, tokens)

    weights, divisors = tokens.extras["correction_weights"].tolist(), reference_divisors(tokens, config)
    expected, expected_N = 0.0, torch.zeros_like(gradient_N)
    for n, (objective, slope) in reference_objectives(tokens, config).items():
        expected -= objective * weights[n] / divisors[n]
        expected_N[n] = -slope * weights[n] / divisors[n]
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient_N, expected_N, rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
@given(tokens=batches(), loss=st.sampled_from(["gspo", "gmpo"]))
def test_the_per_token_form_has_the_gradient_of_the_sequence_objective(tokens, loss):
    """GSPO equation and GMPO equation differentiated by autograd as whole sequences, not through stop-gradients."""
    config = config_of(loss, "sequence_mean")
    extras = {name: tokens.extras[name] for name in ("advantages", "old_logprobs")}
    tokens = replace(tokens, extras=extras)
    low, high = config.clip_range()
    objective = torch.zeros((), dtype=torch.float64)
    for members in sequences_of(tokens):
        advantage = extras["advantages"][members[0]]
        log_ratio = tokens.logprobs_N[members] - extras["old_logprobs"][members]
        if loss == "gspo":
            s = log_ratio.mean().exp()
            objective = objective + torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage)
        else:
            sign = advantage.sign()
            log_c = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
            objective = objective + advantage * log_c.mean().exp()
    expected = -objective / tokens.total_sequences

    value, _ = build_loss(config)(tokens)

    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(value, tokens)[0], gradients(expected, tokens)[0], rtol=1e-9, atol=1e-12)


def test_on_the_old_policy_every_ratio_loss_has_the_policy_gradient():
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages_N = torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64)
    extras = {"advantages": advantages_N, "old_logprobs": logprobs_N.detach().clone()}
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        entropy_N=torch.zeros_like(advantages_N),
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
        extras=extras,
        total_tokens=3,
        total_sequences=2,
    )
    for loss in LOSSES:
        value, _ = build_loss(config_of(loss))(tokens)
        torch.testing.assert_close(torch.autograd.grad(value, logprobs_N)[0], -advantages_N / 3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@settings(max_examples=20)
@given(tokens=batches(), aggregation=st.sampled_from(AGGREGATIONS))
def test_kl_and_entropy_enter_the_loss_with_their_coefficients(estimator, tokens, aggregation):
    plain = config_of("ppo_clip", aggregation)
    config = replace(plain, kl_coefficient=0.3, kl_estimator=estimator, kl_ratio_weight=False, entropy_coefficient=0.2)
    value, metrics = build_loss(config)(tokens)
    expected, _ = build_loss(plain)(tokens)
    gradient_N, entropy_gradient_N = gradients(value, tokens)
    plain_N, _ = gradients(expected, tokens)

    divisors, keep = reference_divisors(tokens, config), tokens.extras["keep"].tolist()
    kl = entropy = 0.0
    for n, divisor in divisors.items():
        x = (tokens.extras["ref_logprobs"][n] - tokens.logprobs_N[n]).item()
        kl += keep[n] * {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator] / divisor
        entropy += keep[n] * tokens.entropy_N[n].item() / divisor
        slope = {"k1": 1.0, "k2": -x, "k3": 1 - math.exp(x)}[estimator]
        assert gradient_N[n].item() == pytest.approx(plain_N[n].item() + 0.3 * keep[n] * slope / divisor, abs=1e-12)
        assert entropy_gradient_N[n].item() == pytest.approx(-0.2 * keep[n] / divisor)
    assert value.item() == pytest.approx(expected.item() + 0.3 * kl - 0.2 * entropy, rel=1e-9, abs=1e-12)
    assert metrics["loss/kl"].value == pytest.approx(0.3 * kl, abs=1e-12)
    assert metrics["loss/total"].value == pytest.approx(value.item())


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_capped"])
@settings(max_examples=20)
@given(tokens=batches(), aggregation=st.sampled_from(AGGREGATIONS), cap=st.sampled_from([None, 1.5]))
def test_the_penalty_is_weighted_by_the_ratio_to_the_policy_that_sampled(estimator, tokens, aggregation, cap):
    """Value w · k and gradient w · log(p/q), by a loop over tokens."""
    plain = config_of("ppo_clip", aggregation, correction="token_tis" if cap else "none", tis_cap=cap)
    config = replace(plain, kl_coefficient=0.3, kl_estimator=estimator)
    assert {"ref_logprobs", "rollout_logprobs"} <= set(build_loss(config).required_extras)
    value, metrics = build_loss(config)(tokens)
    expected, _ = build_loss(plain)(tokens)
    gradient_N, plain_N = gradients(value, tokens)[0], gradients(expected, tokens)[0]
    keep, kl = tokens.extras["keep"].tolist(), 0.0
    for n, divisor in reference_divisors(tokens, config).items():
        own = tokens.logprobs_N[n].item()
        x = tokens.extras["ref_logprobs"][n].item() - own
        weight = min(math.exp(own - tokens.extras["rollout_logprobs"][n].item()), cap or 2.0)
        k3 = math.exp(x) - 1 - x
        kl += keep[n] * weight * {"k2": x * x / 2, "k3": k3, "k3_capped": min(k3, 10.0)}[estimator] / divisor
        slope = 0.0 if estimator == "k3_capped" and k3 >= 10 else -x
        wanted = plain_N[n].item() + 0.3 * keep[n] * weight * slope / divisor
        assert gradient_N[n].item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert metrics["loss/kl"].value == pytest.approx(0.3 * kl, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_a_weighted_penalty_has_the_gradient_of_the_divergence_on_samples_of_another_policy(estimator, drift):
    """Over all tokens of a small vocabulary instead of samples: the gradient in the logits is exact."""
    generator = torch.Generator().manual_seed(0)
    theta_V, drift_V, other_V = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    sampled_V = (theta_V + drift * drift_V).log_softmax(0)
    reference_V = (theta_V + 0.7 * other_V).log_softmax(0)

    def gradient(divergence):
        logits_V = theta_V.clone().requires_grad_()
        return torch.autograd.grad(divergence(logits_V.log_softmax(0)), logits_V)[0]

    true_V = gradient(lambda own_V: (own_V.exp() * (own_V - reference_V)).sum())
    weighted_V = gradient(
        lambda own_V: (sampled_V.exp() * weighted_kl(own_V, reference_V, sampled_V, estimator, cap=1e6)).sum()
    )
    torch.testing.assert_close(weighted_V, true_V)
    plain_V = gradient(lambda own_V: (sampled_V.exp() * kl_per_token(own_V, reference_V, estimator)).sum())
    cosine = torch.cosine_similarity(plain_V, true_V, dim=0).item()
    assert (cosine > 0.9999) == (estimator == "k2" and drift == 0), "only k2 on policy needs no weight"
    value = (sampled_V.exp() * weighted_kl(theta_V.log_softmax(0), reference_V, sampled_V, "k3", cap=1e6)).sum()
    own_V = theta_V.log_softmax(0)
    assert value.item() == pytest.approx((own_V.exp() * (own_V - reference_V)).sum().item())


def test_a_capped_k3_is_that_of_verl():
    """Value and gradient, on both sides of the cap (verl: clamp(exp(x) - x - 1, -10, 10))."""
    other_N = torch.tensor([-30.0, -12.0, -1.0, 0.0, 1.0, 2.5, 2.8, 30.0], dtype=torch.float64)
    logprobs_N = torch.zeros_like(other_N, requires_grad=True)
    found_N = kl_per_token(logprobs_N, other_N, "k3_capped")
    x_N = (other_N - logprobs_N).clamp(-20, 20)
    wanted_N = (x_N.exp() - x_N - 1).clamp(-10, 10)
    torch.testing.assert_close(found_N, wanted_N)
    gradients_N = [torch.autograd.grad(values_N.sum(), logprobs_N)[0] for values_N in (found_N, wanted_N)]
    torch.testing.assert_close(*gradients_N)


def take(tokens, order):
    """The batch that holds only these sequences, in this order, with the totals of the whole."""
    chosen = [n for s in order for n in sequences_of(tokens)[s]]
    lengths = torch.tensor([len(sequences_of(tokens)[s]) for s in order], dtype=torch.long)
    return replace(
        tokens,
        logprobs_N=tokens.logprobs_N[chosen],
        entropy_N=tokens.entropy_N[chosen],
        sequence_N=torch.repeat_interleave(torch.arange(len(order)), lengths),
        num_sequences=len(order),
        extras={name: values_N[chosen] for name, values_N in tokens.extras.items()},
    )


@settings(max_examples=60)
@given(
    tokens=batches(token_advantages=True),
    loss=st.sampled_from(BY_TOKEN_OR_SEQUENCE),
    aggregation=st.sampled_from(AGGREGATIONS),
    bypass=st.booleans(),
    data=st.data(),
)
def test_neither_micro_batches_nor_the_order_of_sequences_change_anything(tokens, loss, aggregation, bypass, data):
    form = {"correction_form": "bypass", "correction": "geometric_rs", "rs_low": 0.5, "rs_high": 1.5} if bypass else {}
    function = build_loss(
        config_of(loss, aggregation, kl_coefficient=0.1, entropy_coefficient=0.1, **form),
    )
    order = data.draw(st.permutations(range(tokens.num_sequences)))
    cut = data.draw(st.integers(0, len(order)))
    whole, whole_metrics = function(tokens)
    parts = [function(take(tokens, order[:cut])), function(take(tokens, order[cut:]))]
    split = parts[0][0] + parts[1][0]

    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)
    for got, expected in zip(gradients(split, tokens), gradients(whole, tokens), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    merged = merge_metrics([metrics for _, metrics in parts])
    assert merged.keys() == whole_metrics.keys()
    for name, metric in whole_metrics.items():
        if name != "correction/effective_sample_share":
            assert merged[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_batch_without_a_kept_token_gives_zero_and_finite_zero_gradients(loss, aggregation, num_tokens):
    logprobs_N = torch.full((num_tokens,), -math.inf, requires_grad=True)
    ones_N = torch.ones(num_tokens)
    extras = {
        "advantages": ones_N,
        "old_logprobs": -ones_N * math.inf,
        "ref_logprobs": -ones_N,
        "correction_weights": ones_N * math.inf,
        "keep": 0 * ones_N,
    }
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        entropy_N=ones_N,
        sequence_N=torch.zeros(num_tokens, dtype=torch.long),
        num_sequences=1,
        extras=extras,
        total_tokens=num_tokens,
        total_sequences=min(num_tokens, 1),
    )
    plain = config_of(loss, aggregation, kl_coefficient=0.1, kl_ratio_weight=False, entropy_coefficient=0.1)
    value, metrics = build_loss(plain)(tokens)
    value.backward()
    assert value.item() == 0
    assert logprobs_N.grad.tolist() == [0.0] * num_tokens
    assert all(math.isfinite(metric.value) for metric in metrics.values())
    weighted, sampled = replace(plain, kl_ratio_weight=True), {"rollout_logprobs": -ones_N * math.inf}
    value, _ = build_loss(weighted)(replace(tokens, extras=extras | sampled))
    value.backward()
    assert (value.item(), logprobs_N.grad.tolist()) == (0, [0.0] * num_tokens)


def test_one_broken_token_that_is_rejected_leaves_the_others_finite():
    logprobs_N = torch.tensor([-1.0, -math.inf], requires_grad=True)
    extras = {"advantages": torch.ones(2), "old_logprobs": torch.tensor([-1.1, -1.0]), "keep": torch.tensor([1.0, 0.0])}
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        entropy_N=torch.zeros(2),
        sequence_N=torch.zeros(2, dtype=torch.long),
        num_sequences=1,
        extras=extras,
        total_tokens=2,
        total_sequences=1,
    )
    for loss in LOSSES:
        logprobs_N.grad = None
        build_loss(config_of(loss))(tokens)[0].backward()
        assert logprobs_N.grad.isfinite().all()
        assert logprobs_N.grad[1] == 0


@settings(max_examples=40)
@given(tokens=batches())
def test_metrics_say_what_the_batch_was(tokens):
    config = AlgorithmConfig(clip_low=0.1, clip_high=0.2, dual_clip=1.5)
    _, metrics = build_loss(config)(tokens)
    kept = [n for n, k in enumerate(tokens.extras["keep"].tolist()) if k]
    assert metrics["policy/share_kept"].value == pytest.approx(len(kept) / len(tokens.logprobs_N))
    if not kept:
        assert "policy/ratio_mean" not in metrics
        return
    log_r = (tokens.logprobs_N - tokens.extras["old_logprobs"]).tolist()
    a = tokens.extras["advantages"].tolist()
    r = {n: math.exp(log_r[n]) for n in kept}
    x = {n: (tokens.extras["ref_logprobs"][n] - tokens.logprobs_N[n]).item() for n in kept}

    def mean(values):
        return sum(values) / len(kept)

    expected = {
        "ratio_mean": mean(r.values()),
        "ratio_max": max(r.values()),
        "clip_low": mean(a[n] < 0 and r[n] < 0.9 for n in kept),
        "clip_high": mean(a[n] > 0 and r[n] > 1.2 for n in kept),
        "clip_dual": mean(a[n] < 0 and r[n] > 1.5 for n in kept),
        "entropy": mean(tokens.entropy_N[n].item() for n in kept),
        "kl_old": mean(r[n] - 1 - log_r[n] for n in kept),
        "kl_reference": mean(math.exp(x[n]) - 1 - x[n] for n in kept),
    }
    assert {name: metrics[f"policy/{name}"].value for name in expected} == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert metrics["policy/ratio_max"].how == "max"
    assert metrics["policy/entropy"].weight == len(kept)


@settings(max_examples=30)
@given(tokens=batches())
def test_sft_is_the_mean_cross_entropy_of_the_update(tokens):
    value, metrics = sft_loss(tokens)
    total = -sum(tokens.logprobs_N.tolist())
    assert value.item() == pytest.approx(total / tokens.total_tokens)
    assert metrics["loss/nll"].value == pytest.approx(total / len(tokens.logprobs_N))
    assert gradients(value, tokens)[0].tolist() == pytest.approx([-1 / tokens.total_tokens] * len(tokens.logprobs_N))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, "old_logprobs"),
        ({"correction_form": "bypass"}, "rollout_logprobs"),
        ({"kl_coefficient": 0.1}, "ref_logprobs"),
        ({"correction": "token_tis"}, "correction_weights"),
        ({"correction": "icepop"}, "correction_weights"),
        ({"correction": "geometric_rs"}, "keep"),
    ],
)
def test_a_missing_input_is_named_rather_than_left_out_of_the_loss(changes, missing):
    loss = build_loss(AlgorithmConfig(**changes))
    assert missing in loss.required_extras
    values_N = torch.zeros(2)
    tokens = LossTokens(
        logprobs_N=values_N,
        entropy_N=values_N,
        sequence_N=torch.zeros(2, dtype=torch.long),
        num_sequences=1,
        extras={name: values_N for name in loss.required_extras if name != missing},
        total_tokens=2,
        total_sequences=1,
    )
    with pytest.raises(ShapeError, match=missing):
        loss(tokens)
    extras = dict.fromkeys(loss.required_extras, values_N) | {missing: torch.zeros(3)}
    with pytest.raises(ShapeError, match="3"):
        loss(replace(tokens, extras=extras))


def test_a_function_of_ones_own_is_the_objective(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "from offbeat_objectives import Surrogate\n"
        "def unclipped(tokens, config):\n"
        "    ratio_N = tokens.log_ratio().exp()\n"
        "    return Surrogate(objective_N=ratio_N * tokens.advantages_N, ratio_N=ratio_N)\n"
    )
    monkeypatch.chdir(tmp_path)
    config = AlgorithmConfig(loss="my_losses:unclipped", aggregation="token_mean")
    check_algorithm(config, samples_per_prompt=2)
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages_N = torch.tensor([2.0, 2.0, -1.0])
    extras = {"advantages": advantages_N, "old_logprobs": logprobs_N.detach() - 1}
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        entropy_N=torch.zeros(3),
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
        extras=extras,
        total_tokens=3,
        total_sequences=2,
    )
    value, _ = build_loss(config)(tokens)
    torch.testing.assert_close(value, -math.e * advantages_N.mean())


def test_a_loss_can_be_sent_to_another_process():
    loss = build_loss(AlgorithmConfig(loss="gspo"))
    assert pickle.loads(pickle.dumps(loss)) == loss


@settings(max_examples=40)
@given(tokens=batches())
def test_in_the_bypass_form_the_loss_rejects_by_the_policy_of_now(tokens):
    config = AlgorithmConfig(correction_form="bypass", correction="token_rs", rs_low=0.9, rs_high=1.1)
    tokens = replace(tokens, extras={name: tokens.extras[name] for name in ("advantages", "rollout_logprobs")})
    value, metrics = build_loss(config)(tokens)
    total, rejected = 0.0, 0
    for n, a in enumerate(tokens.extras["advantages"].tolist()):
        r = math.exp((tokens.logprobs_N[n] - tokens.extras["rollout_logprobs"][n]).item())
        if 0.9 <= r <= 1.1:
            total += min(r * a, clip(r, 0.8, 1.2) * a)
        else:
            rejected += 1
    assert value.item() == pytest.approx(-total / tokens.total_tokens, abs=1e-12)
    assert metrics["correction/share_tokens_rejected"].value == pytest.approx(rejected / len(tokens.logprobs_N))


@pytest.mark.parametrize("loss", LOSSES)
@given(tokens=batches())
@settings(max_examples=10)
def test_the_only_step_of_an_update_is_that_with_the_trainers_own_logprobs(loss, tokens):
    config = config_of(loss)
    advantages = {"advantages": tokens.extras["advantages"]}
    with_old = {**advantages, "old_logprobs": tokens.logprobs_N.detach().clone()}
    found = []
    for single_step, extras in ((False, with_old), (True, advantages)):
        value, metrics = build_loss(config, single_step=single_step)(replace(tokens, extras=extras))
        (gradient_N,) = torch.autograd.grad(value, tokens.logprobs_N)
        found.append((value, gradient_N, metrics))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    # The ratio is 1 by construction: nothing is written that looks like a measurement of it.
    constant = {name for name in found[0][2] if name.startswith(("policy/ratio", "policy/clip", "policy/kl_old"))}
    assert constant >= {"policy/ratio_mean", "policy/ratio_max", "policy/kl_old"}
    assert found[0][2].keys() - found[1][2].keys() == constant
    assert found[0][2]["policy/ratio_mean"].value == 1.0


@pytest.mark.parametrize("correction", CORRECTIONS)
@given(tokens=batches(), loss=st.sampled_from(BY_TOKEN_OR_SEQUENCE))
@settings(max_examples=15)
def test_the_only_step_of_an_update_corrects_by_the_trainers_own_logprobs(correction, tokens, loss):
    """As with recomputed log-probabilities, one micro-batch a sequence, without asking for them."""
    config = config_of(loss, "sequence_mean", correction=correction, correction_form="decoupled")
    rollout_N, own_N = tokens.extras["rollout_logprobs"], tokens.logprobs_N.detach().clone()
    common = {"advantages": tokens.extras["advantages"], "rollout_logprobs": rollout_N}
    before = correct_rollouts(own_N, rollout_N, tokens.sequence_N, tokens.num_sequences, config)
    made = {"old_logprobs": own_N, "correction_weights": before.weights_N, "keep": before.keep_N}
    expected, _ = build_loss(config)(replace(tokens, extras=common | made))

    build = build_loss(config, single_step=True)
    assert set(build.required_extras) <= set(common)
    parts = [build(sequence_alone(replace(tokens, extras=common), s)) for s in range(tokens.num_sequences)]

    found = torch.stack([value for value, _ in parts]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(found, tokens)[0], gradients(expected, tokens)[0], rtol=1e-9, atol=1e-12)
    if correction != "none":
        metrics = merge_metrics([metrics for _, metrics in parts])
        for name in before.metrics.keys() - {"correction/effective_sample_share"}:
            assert metrics[name].value == pytest.approx(before.metrics[name].value, rel=1e-6, abs=1e-9), name


def sequence_alone(tokens, s):
    """A micro-batch of one sequence."""
    chosen_N = tokens.sequence_N == s
    return replace(
        tokens,
        logprobs_N=tokens.logprobs_N[chosen_N],
        entropy_N=tokens.entropy_N[chosen_N],
        sequence_N=torch.zeros(int(chosen_N.sum()), dtype=torch.long),
        num_sequences=1,
        extras={name: values_N[chosen_N] for name, values_N in tokens.extras.items()},
    )
