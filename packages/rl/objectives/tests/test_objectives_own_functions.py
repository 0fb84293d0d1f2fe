"""A loss and an advantage of one's own: what they say reaches the metrics, and faulty ones are found before a run."""

import pytest
import torch
from hypothesis import given, settings
from loss_batches import batches

from offbeat_core import ConfigError, DataError, ShapeError
from offbeat_objectives import AlgorithmConfig, build_loss, check_algorithm, compute_advantages, try_functions

HEAD = "import torch\nfrom offbeat_objectives import Advantages, Surrogate\n\n"
SOUND_LOSS = """
def loss(tokens, config):
    ratio_N = tokens.log_ratio().exp()
    bounded_N = ratio_N.clamp(max=config.options["most"])
    far_N = ratio_N > config.options["most"]
    return Surrogate(objective_N=bounded_N * tokens.advantages_N, ratio_N=ratio_N, metrics_N={"far": far_N})
"""
SOUND_ADVANTAGE = """
def advantage(samples, config):
    better_S = samples.rewards_S - samples.prompt_mean(samples.rewards_S)
    shorter_S = samples.prompt_mean(samples.lengths_S.double()) - samples.lengths_S
    values_S = better_S + config.options["most"] * shorter_S
    return Advantages(advantages_N=samples.spread(values_S), metrics_N={"better": samples.spread(better_S) > 0})
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module beside the configuration, and names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        name = f"own_{tmp_path.name.replace('-', '_')}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(HEAD + text)
        return name

    return write


def test_what_a_loss_of_ones_own_measures_is_a_mean_over_the_kept_tokens(module):
    config = AlgorithmConfig(loss=f"{module(SOUND_LOSS)}:loss", options={"most": 1.05})
    check_algorithm(config, samples_per_prompt=2)
    assert "with a gradient" in try_functions(config)[0]

    @settings(max_examples=15)
    @given(tokens=batches())
    def holds(tokens):
        value, metrics = build_loss(config)(tokens)
        keep, weights = tokens.extras["keep"].tolist(), tokens.extras["correction_weights"].tolist()
        ratios = (tokens.logprobs_N - tokens.extras["old_logprobs"]).exp().tolist()
        kept = [n for n, k in enumerate(keep) if k]
        total = sum(min(ratios[n], 1.05) * tokens.extras["advantages"][n].item() * weights[n] for n in kept)
        assert value.item() == pytest.approx(-total / tokens.total_tokens, abs=1e-12)
        if kept:
            assert metrics["objective/far"].value == pytest.approx(sum(ratios[n] > 1.05 for n in kept) / len(kept))
            assert metrics["objective/far"].weight == len(kept)

    holds()


def test_an_advantage_of_ones_own_sees_prompts_and_lengths_and_is_measured(module):
    config = AlgorithmConfig(advantage=f"{module(SOUND_ADVANTAGE)}:advantage", options={"most": 0.1})
    assert check_algorithm(config, samples_per_prompt=2) == ()
    assert "a sample alone" in try_functions(config)[0]
    rewards_S, prompts_S = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([9, 9, 4])
    advantages_N, metrics = compute_advantages(config, rewards_S, prompts_S, torch.tensor([1, 3, 2]))
    assert advantages_N.dtype == torch.float32
    assert advantages_N.tolist() == pytest.approx([0.6, -0.6, -0.6, -0.6, 0.0, 0.0])
    assert (metrics["advantage/better"].value, metrics["advantage/better"].weight) == (pytest.approx(1 / 6), 6)


@pytest.mark.parametrize(
    ("body", "check", "words"),
    [
        ("return tokens.advantages_N", "returns", "a Tensor; return a Surrogate"),
        (
            "return Surrogate(objective_N=tokens.logprobs_N.sum(), ratio_N=tokens.log_ratio())",
            "shape",
            "objective_N is ()",
        ),
        ("return Surrogate(objective_N=tokens.logprobs_N, ratio_N=1.0)", "shape", "ratio_N is float"),
        (
            "return Surrogate(objective_N=tokens.logprobs_N, ratio_N=tokens.old_N, metrics_N={'a': tokens.old_N[:1]})",
            "shape",
            "metrics_N['a'] is (1,)",
        ),
        ("return Surrogate(objective_N=tokens.logprobs_N / (0 * tokens.old_N), ratio_N=tokens.old_N)", "finite", "inf"),
        (
            "return Surrogate(objective_N=tokens.advantages_N * tokens.logprobs_N.detach(), ratio_N=tokens.old_N)",
            "gradient",
            "has none",
        ),
        ("return Surrogate(objective_N=0 * tokens.logprobs_N, ratio_N=tokens.old_N)", "gradient", "0 everywhere"),
        (
            "return Surrogate(objective_N=(tokens.logprobs_N - tokens.old_N).abs().sqrt(), ratio_N=tokens.old_N)",
            "finite",
            "the gradient is not",
        ),
        (
            "advantages_N = tokens.advantages_N - tokens.advantages_N.mean()\n"
            "    return Surrogate(objective_N=tokens.logprobs_N * advantages_N, ratio_N=tokens.old_N)",
            "rejected tokens without influence",
            "weigh sums by tokens.keep_N",
        ),
        (
            "best = tokens.advantages_N.max()\n"
            "    return Surrogate(objective_N=tokens.logprobs_N * best, ratio_N=tokens.old_N * 0 + 1)",
            "rejected tokens without influence",
            "the objective changed",
        ),
        (
            "least = tokens.sequence_N.min()\n"
            "    return Surrogate(objective_N=tokens.logprobs_N * (1 + least), ratio_N=tokens.old_N)",
            "runs",
            "no token: ",
        ),
        (
            "weight_N = tokens.keep_N / tokens.keep_N.sum()\n"
            "    return Surrogate(objective_N=tokens.logprobs_N * weight_N, ratio_N=tokens.old_N)",
            "finite",
            "objective_N has nan",
        ),
        ("return tokens.nonsense", "runs", "AttributeError: 'PolicyTokens' object has no attribute 'nonsense'"),
    ],
)
def test_a_loss_that_would_fail_a_run_fails_before_it_in_one_line_that_names_the_check(module, body, check, words):
    name = f"{module(f'def loss(tokens, config):{chr(10)}    {body}{chr(10)}')}:loss"
    with pytest.raises(ConfigError) as error:
        try_functions(AlgorithmConfig(loss=name))
    text = str(error.value)
    assert text.startswith(f"algorithm.loss {name} failed the check {check!r} on random data: ")
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("body", "check", "words"),
    [
        ("return samples.rewards_S", "returns", "return a Advantages"),
        ("return Advantages(advantages_N=samples.rewards_S)", "shape", "advantages_N is (12,)"),
        ("return Advantages(advantages_N=0 * samples.token_rewards_N)", "learns", "is 0"),
        (
            "values_S = samples.rewards_S - samples.prompt_mean(samples.rewards_S)\n"
            "    return Advantages(advantages_N=samples.spread(values_S / samples.prompt_mean(values_S.abs())))",
            "finite",
            "nan",
        ),
        ("raise ValueError('first line\\nsecond')", "runs", "ValueError: first line ("),
        ("return Advantages(advantages_N=samples.spread(samples.parts_S['right']))", "runs", "KeyError: 'right'"),
    ],
)
def test_an_advantage_that_would_fail_a_run_fails_before_it(module, body, check, words):
    name = f"{module(f'def advantage(samples, config):{chr(10)}    {body}{chr(10)}')}:advantage"
    with pytest.raises(ConfigError) as error:
        try_functions(AlgorithmConfig(advantage=name), {"exact_match": 1.0})
    text = str(error.value)
    assert text.startswith(f"algorithm.advantage {name} failed the check {check!r} on random data: ")
    assert words in text
    assert "\n" not in text


def test_an_advantage_is_tried_with_the_rewards_of_the_run(module):
    text = "def advantage(samples, config):\n    values_S = samples.parts_S['right']\n"
    text += "    return Advantages(advantages_N=samples.spread(values_S))\n"
    config = AlgorithmConfig(advantage=f"{module(text)}:advantage")
    assert len(try_functions(config, {"right": 0.5, "short": 0.1})) == 1


def test_built_in_functions_are_not_tried():
    assert try_functions(AlgorithmConfig()) == ()


def test_what_the_trial_could_not_see_is_named_when_it_happens(module):
    text = (
        "def short(samples, config):\n    return Advantages(advantages_N=samples.rewards_S[:1])\n"
        "def endless(samples, config):\n    return Advantages(advantages_N=samples.token_rewards_N / 0)\n"
    )
    name, data = module(text), (torch.tensor([1.0, 0.5]), torch.tensor([0, 0]), torch.tensor([1, 1]))
    with pytest.raises(ShapeError, match=f"{name}:short"):
        compute_advantages(AlgorithmConfig(advantage=f"{name}:short"), *data)
    with pytest.raises(DataError, match=f"{name}:endless"):
        compute_advantages(AlgorithmConfig(advantage=f"{name}:endless"), *data)
