"""Rollout correction against loops in float64, and over real processes where a batch is shared."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat_core import Metric, ShapeError, merge_metrics
from offbeat_objectives import AlgorithmConfig, check_algorithm, correct_rollouts
from offbeat_objectives._config.algorithm import CORRECTIONS

RANK = str(Path(__file__).with_name("objectives_rank.py"))
BOUNDS = {"token_rs": (0.5, 2.0), "sequence_rs": (0.5, 2.0), "geometric_rs": (0.999, 1.001)}


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([1e-4, 0.02, 0.5, 30.0]))
    rollout_N = -3 * torch.rand(sum(lengths), generator=generator, dtype=torch.float64)
    train_N = rollout_N + spread * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    return train_N, rollout_N, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), len(lengths)


def bounded(x):
    return max(-20.0, min(20.0, x))


def reference(train_N, rollout_N, sequence_N, num_sequences, config):
    """Weights and keeps of every token, by loops, with the defaults of the design."""
    name, weights, keeps = config.correction, {}, {}
    for s in range(num_sequences):
        members = [n for n, owner in enumerate(sequence_N.tolist()) if owner == s]
        logs = [bounded((train_N[n] - rollout_N[n]).item()) for n in members]
        for n, log_r in zip(members, logs, strict=True):
            statistic = {
                "token": math.exp(log_r),
                "sequence": math.exp(bounded(sum(logs))),
                "geometric": math.exp(sum(logs) / len(logs)),
            }
            weights[n], keeps[n] = 1.0, 1.0
            for level in ("token", "sequence"):
                if name.startswith(f"{level}_tis"):
                    cap = config.tis_cap or 2.0
                    both = name == f"{level}_tis_{level}_rs" and config.tis_cap is None
                    weights[n] = statistic[level] if both else min(statistic[level], cap)
            for level in ("token", "sequence", "geometric"):
                if name.endswith(f"{level}_rs"):
                    low, high = BOUNDS[f"{level}_rs"]
                    low, high = config.rs_low or low, config.rs_high or high
                    keeps[n] = float(low <= statistic[level] <= high)
            if name == "icepop":
                low, high = config.rs_low or 0.5, config.rs_high or 5.0
                weights[n] = statistic["token"] if low <= statistic["token"] <= high else 0.0
    if config.normalise_weights:
        owners, votes = sequence_N.tolist(), []
        for n in weights:
            first = not any(owners[k] == owners[n] and keeps[k] for k in range(n))
            if keeps[n] and (first or not name.startswith("sequence")):
                votes.append(weights[n])
        scale = sum(votes) / len(votes) if votes and sum(votes) else 1.0
        weights = {n: weight / scale for n, weight in weights.items()}
    return [weights[n] for n in sorted(weights)], [keeps[n] for n in sorted(keeps)]


# Of three sequences every rejection of tokens takes none, one of two, and the only token.
SOME_REFUSED = (
    torch.tensor([0.3, 0.1, 5.0, 5.0], dtype=torch.float64),
    torch.zeros(4, dtype=torch.float64),
    torch.tensor([0, 1, 1, 2]),
    3,
)


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=25)
@given(batch=batches(), tight=st.booleans(), normalise=st.booleans())
@example(batch=SOME_REFUSED, tight=False, normalise=True)
def test_a_preset_does_what_its_name_says(name, batch, tight, normalise):
    changes = {}
    if tight and "tis" in name:
        changes["tis_cap"] = 1.01
    if tight and ("rs" in name or name == "icepop"):
        changes |= {"rs_low": 0.95, "rs_high": 1.08}
    if normalise and ("tis" in name or name == "icepop"):
        changes["normalise_weights"] = True
    config = AlgorithmConfig(correction=name, **changes)
    check_algorithm(config, samples_per_prompt=4)

    correction = correct_rollouts(*batch, config)

    weights, keeps = reference(*batch, config)
    assert correction.keep_N.tolist() == keeps
    torch.testing.assert_close(correction.weights_N, torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=20)
@given(batch=batches())
def test_metrics_are_those_of_the_batch(name, batch):
    train_N, rollout_N, sequence_N, _ = batch
    correction = correct_rollouts(*batch, AlgorithmConfig(correction=name))
    metrics = correction.metrics
    if len(train_N) == 0:
        assert metrics == {}
        return
    logs = [bounded(x) for x in (train_N - rollout_N).tolist()]
    weights, keeps, owners = correction.weights_N.tolist(), correction.keep_N.tolist(), sequence_N.tolist()
    used = [w * k for w, k in zip(weights, keeps, strict=True)]
    lost = [s for s in set(owners) if not any(k for k, owner in zip(keeps, owners, strict=True) if owner == s)]
    squares = sum(u * u for u in used)
    sums = [bounded(sum(x for x, owner in zip(logs, owners, strict=True) if owner == s)) for s in owners]
    ratios = {"token": [math.exp(x) for x in logs], "sequence": [math.exp(x) for x in sums]}
    level = name.partition("_")[0]
    is_capped = "tis" in name and name != f"{level}_tis_{level}_rs"  # the same bound twice would be one too many
    truncated = [ratio > 2 for ratio in ratios[level]] if is_capped else [weight == 0 for weight in weights]
    expected = {
        "sequence_ratio_max": math.exp(max(sums)),
        "weight_mean": sum(weights) / len(weights),
        "share_truncated": sum(truncated) / len(truncated),
        "ratio_mean": sum(map(math.exp, logs)) / len(logs),
        "ratio_max": math.exp(max(logs)),
        "ratio_min": math.exp(min(logs)),
        "share_tokens_rejected": 1 - sum(keeps) / len(keeps),
        "share_sequences_rejected": len(lost) / len(set(owners)),
        "kl_rollout_train": sum(math.exp(x) - 1 - x for x in logs) / len(logs),
        "effective_sample_share": sum(used) ** 2 / squares / len(logs) if squares > 1e-18 else None,
    }
    for key, value in expected.items():
        if value is not None:
            assert metrics[f"correction/{key}"].value == pytest.approx(value, rel=1e-6, abs=1e-9), key
    assert 0 <= metrics["correction/effective_sample_share"].value <= 1 + 1e-9


def test_bounds_are_on_r_and_not_on_its_inverse():
    """A filter that holds -log r between the logs of the bounds would bound 1/r: keep 1.64 and drop 0.61."""
    r_N = torch.tensor([0.59, 0.61, 1.0, 1.59, 1.64])
    config = AlgorithmConfig(correction="token_rs", rs_low=0.6, rs_high=1.6)
    correction = correct_rollouts(r_N.log(), torch.zeros(5), torch.zeros(5, dtype=torch.long), 1, config)
    assert correction.keep_N.tolist() == [0, 1, 1, 1, 0]


def test_equal_policies_change_nothing():
    logprobs_N, sequence_N = torch.tensor([-1.0, -0.2, -3.0]), torch.tensor([0, 0, 2])
    for name in CORRECTIONS:
        correction = correct_rollouts(logprobs_N, logprobs_N, sequence_N, 3, AlgorithmConfig(correction=name))
        assert correction.weights_N.tolist() == [1, 1, 1]
        assert correction.keep_N.tolist() == [1, 1, 1]


def test_a_broken_log_probability_stays_bounded_or_is_rejected():
    train_N, rollout_N = torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -1.0])
    sequence_N = torch.tensor([0, 1])
    weighted = correct_rollouts(train_N, rollout_N, sequence_N, 2, AlgorithmConfig(correction="token_tis"))
    assert weighted.weights_N.tolist() == pytest.approx([math.exp(-20), 1.0])
    rejected = correct_rollouts(
        torch.tensor([math.nan, -1.0]), rollout_N, sequence_N, 2, AlgorithmConfig(correction="token_rs")
    )
    assert rejected.keep_N.tolist() == [0, 1]


def test_inputs_of_different_lengths_are_refused():
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        correct_rollouts(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.long), 1, AlgorithmConfig())


def run_ranks(world_size, folder):
    """What each rank of a real process group wrote."""
    paths = [folder / f"answer-{world_size}-{rank}.json" for rank in range(world_size)]
    ranks = [
        subprocess.Popen([sys.executable, RANK, str(rank), str(world_size), str(folder / "store"), str(path)])
        for rank, path in enumerate(paths)
    ]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def metrics_of(written):
    return {name: Metric(**fields) for name, fields in written.items()}


def test_ranks_that_share_a_batch_normalise_as_one_process_would(tmp_path):
    (alone,) = run_ranks(1, tmp_path)
    ranks = run_ranks(3, tmp_path)

    def joined(read):
        return [value for rank in ranks for value in read(rank)]

    assert joined(lambda rank: rank["advantages"]) == pytest.approx(alone["advantages"])
    for name, values in alone["over_prompts"].items():
        assert joined(lambda rank, name=name: rank["over_prompts"][name]) == pytest.approx(values), name
    # Two of three samples are of a prompt whose rewards, 0 and 1, differ.
    assert alone["over_prompts"]["gpg"] == pytest.approx([-0.75] * 2 + [0.75] * 3 + [0.0] * 4)
    for i in (0, 1):
        assert joined(lambda rank, i=i: rank["weights"][i]) == pytest.approx(alone["weights"][i])
        merged = merge_metrics([metrics_of(rank["metrics"][i]) for rank in ranks])
        expected = metrics_of(alone["metrics"][i])
        assert merged.keys() == expected.keys()
        for name in expected.keys() - {"correction/effective_sample_share"}:
            assert merged[name].value == pytest.approx(expected[name].value), name
        assert expected["correction/mean_weight_before_normalising"].value != pytest.approx(1.0)
