"""Preference losses against formulas written out in float64, whole and in micro-batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_core import ConfigError, LossTokens, ShapeError, merge_metrics
from offbeat_objectives import PreferenceConfig, PreferenceLoss, check_preference, kto_baseline

PAIRWISE = ("dpo", "ipo", "orpo", "simpo", "reward")


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def odds(logp):
    return math.log(math.exp(logp) / (1 - math.exp(logp)))


def written_out(config, sequences):
    """The loss of whole batches by loops: each sequence is a dict of lists of floats."""
    beta = config.beta
    smoothing, margin, center = config.label_smoothing or 0.0, config.target_margin or 0.0, config.center_rewards or 0.0
    for each in sequences:
        each["own"] = [n for n, inside in enumerate(each["answer"]) if inside]
        each["sum"] = sum(each["logprobs"][n] for n in each["own"])
        each["ratio"] = sum(each["logprobs"][n] - each["reference"][n] for n in each["own"])
        each["mean"], each["mean_ratio"] = each["sum"] / len(each["own"]), each["ratio"] / len(each["own"])
    if config.loss == "kto":
        total = 0.0
        for each in sequences:
            good = each["sign"] > 0
            gain = (each["ratio"] - each["baseline"]) * (1 if good else -1)
            weight = config.desirable_weight if good else config.undesirable_weight
            total += weight * (1 - 1 / (1 + math.exp(-beta * gain)))
        return total / len(sequences)
    total, pairs = 0.0, {each["pair"] for each in sequences}
    for pair in pairs:
        chosen = next(each for each in sequences if each["pair"] == pair and each["sign"] > 0)
        rejected = next(each for each in sequences if each["pair"] == pair and each["sign"] < 0)
        if config.loss == "ipo":
            total += (chosen["mean_ratio"] - rejected["mean_ratio"] - 1 / (2 * beta)) ** 2
        elif config.loss == "orpo":
            total -= beta * log_sigmoid(odds(chosen["mean"]) - odds(rejected["mean"]))
        elif config.loss == "reward":
            total -= log_sigmoid(chosen["sum"] - rejected["sum"])
            total += center * (chosen["sum"] + rejected["sum"]) ** 2
        else:
            key = "ratio" if config.loss == "dpo" else "mean"
            shift = margin if config.loss == "simpo" else 0.0
            gain = beta * (chosen[key] - rejected[key]) - shift
            total -= (1 - smoothing) * log_sigmoid(gain) + smoothing * log_sigmoid(-gain)
    total /= len(pairs)
    if config.loss == "orpo":
        preferred = [logp for each in sequences if each["sign"] > 0 for logp in each["logprobs"]]
        total -= sum(preferred) / len(preferred)
    return total


@st.composite
def batches(draw, loss):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_pairs = draw(st.integers(1, 4))
    baseline = draw(st.floats(0, 2))
    sequences = []
    for pair in range(num_pairs):
        for sign in (1, -1):
            length = 1 if loss == "reward" else draw(st.integers(1, 5))
            lead = draw(st.integers(0, 2)) if loss == "orpo" and sign > 0 else 0
            logprobs = -3 * torch.rand(lead + length, generator=generator, dtype=torch.float64) - 0.01
            reference = logprobs + 0.5 * torch.randn(lead + length, generator=generator, dtype=torch.float64)
            sequences.append(
                {
                    "logprobs": logprobs.tolist(),
                    "reference": reference.tolist(),
                    "answer": [0] * lead + [1] * length,
                    "sign": sign,
                    "pair": pair,
                    "baseline": baseline,
                }
            )
    order = torch.randperm(len(sequences), generator=generator).tolist()
    return [sequences[at] for at in order]


def tokens_of(sequences, every=None):
    """What an engine hands over for some sequences of a batch."""
    every = every or sequences
    lengths = torch.tensor([len(each["logprobs"]) for each in sequences])
    num_preferred = sum(len(each["logprobs"]) for each in every if each["sign"] > 0)

    def flat(name):
        rows = [
            [each[name]] * len(each["logprobs"]) if not isinstance(each[name], list) else each[name]
            for each in sequences
        ]
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    sign_N = flat("sign")
    return LossTokens(
        logprobs_N=flat("logprobs").requires_grad_(),
        entropy_N=torch.zeros(int(lengths.sum())),
        sequence_N=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        num_sequences=len(sequences),
        extras={
            **{name: flat(name) for name in ("reference", "answer", "pair", "baseline")},
            "sign": sign_N,
            "likelihood": (sign_N > 0).double() / num_preferred,
        },
        total_tokens=0,
        total_sequences=len(every),
    )


def config_of(loss):
    more = {
        "dpo": {"beta": 0.3, "label_smoothing": 0.1},
        "ipo": {"beta": 0.4},
        "kto": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        "orpo": {"beta": 0.2},
        "simpo": {"beta": 2.5, "label_smoothing": 0.1, "target_margin": 0.7},
        "reward": {"center_rewards": 0.05},
    }
    return PreferenceConfig(loss=loss, **more[loss])


@pytest.mark.parametrize("loss", [*PAIRWISE, "kto"])
@settings(max_examples=30)
@given(data=st.data())
def test_a_loss_is_its_formula_whole_and_in_micro_batches(loss, data):
    config, sequences = config_of(loss), data.draw(batches(loss))
    wanted = written_out(config, sequences)
    whole = tokens_of(sequences)
    value, metrics = PreferenceLoss(config)(whole)
    assert float(value.detach()) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    value.backward()
    gradients = dict(
        zip(map(id, sequences), whole.logprobs_N.grad.split([len(s["logprobs"]) for s in sequences]), strict=True)
    )

    shares, reported = 0.0, []
    for pair in {each["pair"] for each in sequences}:  # each pair in a micro-batch of its own
        own = [each for each in sequences if each["pair"] == pair]
        part = tokens_of(own, sequences)
        value, found = PreferenceLoss(config)(part)
        value.backward()
        shares += float(value.detach())
        reported.append(found)
        for each, gradient in zip(own, part.logprobs_N.grad.split([len(s["logprobs"]) for s in own]), strict=True):
            torch.testing.assert_close(gradient, gradients[id(each)])
    assert shares == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    merged = merge_metrics(reported)
    assert merged.keys() == metrics.keys()
    for name, metric in metrics.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("loss", PAIRWISE)
def test_the_gradient_raises_the_chosen_answer_and_lowers_the_rejected_one(loss):
    sequences = [
        {"logprobs": [-1.0], "reference": [-1.0], "answer": [1], "sign": sign, "pair": 0, "baseline": 0.0}
        for sign in (1, -1)
    ]
    config = PreferenceConfig(loss=loss)
    tokens = tokens_of(sequences)
    PreferenceLoss(config)(tokens)[0].backward()
    chosen, rejected = tokens.logprobs_N.grad.tolist()
    assert chosen < 0 < rejected


OF_RATIOS = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "logps/chosen": -3.0, "logps/rejected": -4.0}
OF_MEANS = {"rewards/chosen": -0.75, "rewards/rejected": -2.0, "logps/chosen": -1.5, "logps/rejected": -4.0}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dpo", {**OF_RATIOS, "rewards/margins": 1.0, "rewards/accuracies": 1.0}),
        ("ipo", {**OF_RATIOS, "rewards/margins": 1.0, "rewards/accuracies": 1.0}),
        ("kto", {**OF_RATIOS, "loss/baseline": 0.25}),
        ("orpo", {**OF_MEANS, "rewards/margins": 1.25, "rewards/accuracies": 1.0, "loss/nll": 2.0}),
        ("simpo", {**OF_MEANS, "rewards/margins": 1.25, "rewards/accuracies": 1.0}),
        (
            "reward",
            {"rewards/chosen": -3.0, "rewards/rejected": -4.0, "rewards/margins": 1.0, "rewards/accuracies": 1.0},
        ),
    ],
)
def test_metrics_say_what_the_loss_saw(loss, expected):
    sequences = [
        {"logprobs": [-1.0, -2.0], "reference": [-2.0, -2.0], "answer": [1, 1], "sign": 1, "pair": 0, "baseline": 0.25},
        {"logprobs": [-4.0], "reference": [-3.0], "answer": [1], "sign": -1, "pair": 0, "baseline": 0.25},
    ]
    if loss == "orpo":  # a prompt, whose likelihood is raised, and which is no part of the answer
        sequences[0] = {**sequences[0], "logprobs": [-3.0, -1.0, -2.0], "reference": [0.0] * 3, "answer": [0, 1, 1]}
    config = PreferenceConfig(loss=loss, **({} if loss == "reward" else {"beta": 0.5}))
    _, metrics = PreferenceLoss(config)(tokens_of(sequences))
    summed = {"loss/total", "loss/odds_ratio"}
    assert {name: metric.value for name, metric in metrics.items() if name not in summed} == pytest.approx(expected)


def test_an_answer_that_is_certain_has_finite_odds():
    sequences = [
        {"logprobs": [0.0], "reference": [0.0], "answer": [1], "sign": 1, "pair": 0, "baseline": 0.0},
        {"logprobs": [-80.0], "reference": [0.0], "answer": [1], "sign": -1, "pair": 0, "baseline": 0.0},
    ]
    tokens = tokens_of(sequences)
    value, _ = PreferenceLoss(PreferenceConfig(loss="orpo"))(tokens)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(tokens.logprobs_N.grad).all()


def test_the_baseline_of_kto_is_never_below_0():
    assert kto_baseline([-1.0, -2.0], [-1.5, -2.7]) == pytest.approx(0.6)
    assert kto_baseline([-3.0, -2.0], [-1.5, -2.7]) == 0.0
    assert kto_baseline([], []) == 0.0


def test_half_a_pair_is_refused():
    sequences = [
        {"logprobs": [-1.0], "reference": [-1.0], "answer": [1], "sign": sign, "pair": pair, "baseline": 0.0}
        for sign, pair in ((1, 0), (-1, 1))
    ]
    with pytest.raises(ShapeError, match="group"):
        PreferenceLoss(PreferenceConfig(loss="dpo"))(tokens_of(sequences))


def test_a_missing_extra_is_named():
    tokens = tokens_of(
        [{"logprobs": [-1.0], "reference": [-1.0], "answer": [1], "sign": 1, "pair": 0, "baseline": 0.0}]
    )
    del tokens.extras["reference"]
    with pytest.raises(ShapeError, match="reference"):
        PreferenceLoss(PreferenceConfig(loss="dpo"))(tokens)


def test_a_setting_without_effect_is_refused():
    check_preference(PreferenceConfig(loss="simpo", beta=2.0, target_margin=0.3, label_smoothing=0.1))
    with pytest.raises(ConfigError, match="target_margin is of simpo") as refused:
        check_preference(PreferenceConfig(loss="dpo", target_margin=0.3, center_rewards=0.1))
    assert "preference.center_rewards" in str(refused.value)
    with pytest.raises(ConfigError, match="beta is of"):
        check_preference(PreferenceConfig(beta=0.1))
