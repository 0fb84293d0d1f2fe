"""Several passes over the samples of an update, and samples that were cut off left out of its loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.estimates import BatchArithmetic
from grpo_async_app._preflight.settings import check_settings
from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.groups import SampledGroup
from grpo_async_app._roles.trainer import TrainerRole
from offbeat_core import Completion, ConfigError, LossTokens, Metrics, TrainSequence, Trajectory, load_config
from offbeat_engine_torch import TorchTrainEngine
from offbeat_objectives import AlgorithmConfig, build_loss
from offbeat_weightsync import new_address

RATE = "--engine.learning_rate=1e-2"


def group(number: int, lengths: list[int], rewards: list[float], ended: tuple[str, ...] = ()) -> SampledGroup:
    """Samples of seeded tokens; each ends as `ended` says, or by itself."""
    rng, ends = np.random.default_rng(number), ended or ("done",) * len(lengths)

    def trajectory(length: int, end: Any) -> Trajectory:
        turn = Completion.join(rng.integers(3, 50, length).tolist(), [-3.0] * length, [(0, length)], "eos", "x")
        return Trajectory(turns=(turn,), ended=end)

    return SampledGroup(
        group_id=number,
        item=number,
        prompt_ids=np.array([5, 6, 7], np.int32),
        trajectories=[trajectory(length, end) for length, end in zip(lengths, ends, strict=True)],
        rewards=rewards,
        parts=[{}] * len(lengths),
    )


GROUPS = [group(0, [3, 5], [1.0, 0.0]), group(1, [2, 4], [0.0, 1.0])]


def open_role(config: GrpoConfig, model: Path) -> TrainerRole:
    return TrainerRole(config=config, model_path=str(model), num_updates=3, num_threads=1, socket_paths=[new_address()])


def clipped(tokens: LossTokens[Any]) -> tuple[Tensor, Metrics]:
    """PPO's clipped objective, written out: the mean over the tokens of the step."""
    ratio_N, advantages_N = (tokens.logprobs_N - tokens.extras["old"]).exp(), tokens.extras["advantage"]
    held_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N)
    return -held_N.sum() / tokens.total_tokens, {}


def at_loss_tokens(sequence: TrainSequence, values: Any) -> Any:
    found = np.zeros(len(sequence.ids), np.float32)
    found[sequence.loss_mask] = values
    return found


def at_all(sequences: list[TrainSequence], logprobs: list[Any]) -> Any:
    return np.concatenate([values[each.loss_mask] for each, values in zip(sequences, logprobs, strict=True)])


def by_steps(settings: GrpoConfig, model: Path, plain: list[TrainSequence], num_batches: int, *, anew: bool) -> Any:
    """[N] log-probabilities after two passes of explicit steps; `anew`: the old policy is that of each pass."""
    engine = TorchTrainEngine.create(settings.train_engine(str(model), 3, 1))
    size = 0.5 / (0.5**0.5 + 1e-6)  # of two rewards of 0 and 1: ± 0.5 / (their deviation + 1e-6)
    signs, old = [1, -1, -1, 1], engine.logprobs(plain)
    for _ in range(2):
        old = engine.logprobs(plain) if anew else old
        ready = [
            replace(each, extras={"old": before, "advantage": at_loss_tokens(each, sign * size)})
            for each, before, sign in zip(plain, old, signs, strict=True)
        ]
        for batch in [ready] if num_batches == 1 else [ready[:2], ready[2:]]:
            engine.forward_backward(batch, clipped)
            engine.step()
    found = at_all(plain, engine.logprobs(plain))
    engine.close()
    return found


@pytest.mark.parametrize("num_batches", [1, 2])
def test_passes_are_steps_against_the_policy_before_the_first_of_them(
    config: Path, model: Path, num_batches: int
) -> None:
    """By explicit steps of another engine: log-probabilities before the first, and then the same batches twice."""
    words = [RATE, "--algorithm.num_passes=2", f"--async.require_batches={num_batches}"]
    settings = load_config(config, GrpoConfig, words)
    role, asked = open_role(settings, model), list[int]()
    try:
        logprobs = role._engine.logprobs

        def counted(sequences: list[TrainSequence], *, reference: bool = False) -> Any:
            asked.append(len(sequences))
            return logprobs(sequences, reference=reference)

        role._engine.logprobs = counted  # type: ignore[method-assign]
        metrics = role.update(GROUPS, num_batches)
        assert asked == [4], "the old policy's log-probabilities are computed once, before the first step"
        assert metrics["train/ratio_max"].value > 1.01, "the second pass began where the first one did"
        plain = [each.to_sequence(one.prompt_ids) for one in GROUPS for each in one.trajectories]
        found = at_all(plain, logprobs(plain))
        wanted, anew = (by_steps(settings, model, plain, num_batches, anew=anew) for anew in (False, True))
        np.testing.assert_allclose(found, wanted, atol=1e-3)
        assert np.abs(found - anew).max() > 0.05, "an old policy that is computed anew for each pass is another thing"
    finally:
        role.close()


def test_in_the_bypass_form_the_old_policy_stays_the_sampler(config: Path, model: Path) -> None:
    words = [RATE, "--algorithm.num_passes=2", "--algorithm.correction_form=bypass"]
    role = open_role(load_config(config, GrpoConfig, words), model)
    try:
        role._engine.logprobs = None  # type: ignore[assignment, method-assign]  # nothing is recomputed
        metrics = role.update(GROUPS, 1)
        assert metrics["mismatch/lagged_share"].value == 0.5, "in the second pass the trainer is a step further"
    finally:
        role.close()


def test_the_critic_makes_as_many_passes(config: Path, model: Path) -> None:
    words = [RATE, "--algorithm.num_passes=3", "--algorithm.advantage=gae"]
    role, steps = open_role(load_config(config, GrpoConfig, words), model), list[int]()
    try:
        assert role._critic is not None
        for engine in (role._critic, role._engine):
            step = engine.step

            def counted(step: Any = step, engine: Any = engine) -> Metrics:
                steps.append(id(engine))
                return step()

            engine.step = counted  # type: ignore[method-assign]
        role.update(GROUPS, 1)
        assert steps == [id(role._critic)] * 3 + [id(role._engine)] * 3
    finally:
        role.close()


def test_schedules_and_the_plan_count_the_steps_of_all_passes(config: Path) -> None:
    words = ["--algorithm.num_passes=3", "--async.require_batches=2", "--algorithm.advantage=gae"]
    words += ["--critic.warmup_updates=1", "--engine.max_tokens_per_microbatch=8192"]
    settings = load_config(config, GrpoConfig, words)
    assert settings.train_engine("", num_updates=5).total_steps == (5 - 1) * 2 * 3
    assert settings.critic_engine("", num_updates=5).total_steps == 5 * 2 * 3
    batch = BatchArithmetic(settings)
    assert (batch.steps_per_update, batch.groups_per_update) == (6, 8)
    assert "in each of 3 passes: 6 steps" in dict(batch.rows())["update"]


class FixedLogprobs:
    """Answers `logprobs` only: -1 for every loss token."""

    def logprobs(self, sequences: list[TrainSequence], *, reference: bool = False) -> list[Any]:
        return [-sequence.loss_mask.astype(np.float32) for sequence in sequences]


def test_what_was_cut_off_counts_in_the_mean_of_its_prompt_and_not_in_the_loss() -> None:
    config, engine = AlgorithmConfig(advantage="dr_grpo", mask_truncated=True), FixedLogprobs()
    trainer: Any = engine
    groups = [group(0, [3, 5, 2], [1.0, 0.0, 0.5], ("done", "cut_off", "max_tokens")), group(1, [2], [1.0])]
    [batch], metrics = build_batches(groups, config, trainer, 1)
    assert [int(each.loss_mask.sum()) for each in batch] == [3, 0, 0, 2]
    np.testing.assert_allclose(batch[0].extras["advantages"][batch[0].loss_mask], 0.5)  # 1 less the mean of all three
    assert metrics["train/masked_share"].value == pytest.approx(0.5)
    [whole], plain = build_batches(groups, AlgorithmConfig(advantage="dr_grpo"), trainer, 1)
    assert [int(each.loss_mask.sum()) for each in whole] == [3, 5, 2, 2]
    assert "train/masked_share" not in plain


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_are_normalised_over_what_is_in_the_loss(advantage: str) -> None:
    """A long sample that was cut off would move the mean of all others."""
    trainer: Any = FixedLogprobs()
    groups = [group(0, [3, 90], [1.0, 0.0], ("done", "cut_off")), group(1, [2, 4], [1.0, 0.0])]
    config = AlgorithmConfig(advantage=advantage, mask_truncated=True)
    [batch], _ = build_batches(groups, config, trainer, 1)
    learned = np.concatenate([each.extras["advantages"][each.loss_mask] for each in batch])
    assert len(learned) == 9
    assert learned.mean() == pytest.approx(0.0, abs=1e-6)
    assert learned.std() == pytest.approx(1.0, abs=1e-4)


def test_weights_are_normalised_over_what_is_in_the_loss() -> None:
    trainer: Any = FixedLogprobs()
    groups = [group(0, [3, 5], [1.0, 0.0], ("done", "cut_off")), group(1, [2, 4], [1.0, 0.0])]
    for number, each in enumerate(trajectory for found in groups for trajectory in found.trajectories):
        each.logprobs[:] = np.linspace(-1.5, -0.9, each.num_tokens) - number
    config = AlgorithmConfig(correction="token_tis", tis_cap=1e3, normalise_weights=True, mask_truncated=True)
    [batch], metrics = build_batches(groups, config, trainer, 1)
    weights = np.concatenate([each.extras["correction_weights"][each.loss_mask] for each in batch])
    assert len(weights) == 9
    assert weights.mean() == pytest.approx(1.0, abs=1e-5)
    assert metrics["correction/weight_mean"].value == pytest.approx(1.0, abs=1e-5)


def test_an_episode_is_left_out_whole_where_one_of_its_trajectories_was_cut_off() -> None:
    config = AlgorithmConfig(advantage="dr_grpo", mask_truncated=True)
    trainer: Any = FixedLogprobs()
    branched = group(0, [3, 5, 2], [1.0, 0.0], ("done", "cut_off", "done"))
    groups = [SampledGroup(**{**vars(branched), "parts": [{}, {}], "sizes": [2, 1]})]
    [batch], _ = build_batches(groups, config, trainer, 1)
    assert [int(each.loss_mask.sum()) for each in batch] == [0, 0, 2]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_loss_is_that_of_a_batch_without_what_was_cut_off(config: Path, model: Path, aggregation: str) -> None:
    engine = TorchTrainEngine.create(load_config(config, GrpoConfig, []).train_engine(str(model), 3, 1))
    algorithm = AlgorithmConfig(mask_truncated=True, aggregation=aggregation)
    loss = build_loss(algorithm)
    [batch], _ = build_batches([group(0, [3, 5], [1.0, 0.0], ("done", "cut_off"))], algorithm, engine, 1)
    with_masked = engine.forward_backward(batch, loss)["loss"].value
    without = engine.forward_backward(batch[:1], loss)["loss"].value
    assert with_masked == pytest.approx(without, abs=1e-6)
    assert abs(without) > 1e-3
    engine.close()


def test_where_all_samples_were_cut_off_nothing_is_learned(config: Path, model: Path) -> None:
    role = open_role(load_config(config, GrpoConfig, [RATE, "--algorithm.mask_truncated=true"]), model)
    try:
        before = {name: tensor.clone() for name, tensor in role._engine.weights()}
        metrics = role.update([group(1, [3, 5], [1.0, 0.0], ("cut_off", "max_turns"))], 1)
        assert metrics["train/loss"].value == 0
        assert metrics["train/masked_share"].value == 1.0
        assert all(np.isfinite(metric.value) for metric in metrics.values())
        assert all(torch.equal(tensor, before[name]) for name, tensor in role._engine.weights())
    finally:
        role.close()


def test_values_after_what_is_not_learned_from_are_refused(config: Path) -> None:
    words = ["--algorithm.advantage=gae", "--algorithm.mask_truncated=true", "--critic.bootstrap_truncated=true"]
    with pytest.raises(ConfigError, match=r"critic\.bootstrap_truncated has no effect with algorithm\.mask_truncated"):
        check_settings(resolve(load_config(config, GrpoConfig, words)))
