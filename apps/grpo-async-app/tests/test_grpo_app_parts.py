"""The parts of the driver that need no process: busy shares, groups on disk, batches, the plan, the configuration."""

import asyncio
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from grpo_async_app._config.everyday import EVERYDAY
from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.engines import Engines
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._preflight.settings import check_same_data
from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.groups import SampledGroup, load_groups, save_groups
from grpo_async_app._roles.trainer import _named
from grpo_async_app._run.log.cut_off_alarm import CutOffAlarm
from grpo_async_app._run.log.mismatch_alarm import MismatchAlarm
from grpo_async_app._run.log.run_logger import RunLogger, _group_metrics, _turn_metrics
from grpo_async_app._run.sampling import Rollouts, ScoredSample
from grpo_async_app._run.validation import Answered, OutdatedError, Validation, validate
from offbeat_async_policy import BusyShares, Statistics
from offbeat_core import (
    INSTALL_LINES,
    Completion,
    ConfigError,
    GenerateRequest,
    Metric,
    Reply,
    SamplingParams,
    StopReason,
    TrainSequence,
    Trajectory,
    TrajectoryEnd,
    VersionSegment,
    check_limits,
    dump_config,
    installed_backends,
    load_config,
    merge_metrics,
    parse_config,
)
from offbeat_data import Prompt, RewardScore
from offbeat_engine_torch import TorchTrainEngine
from offbeat_objectives import AlgorithmConfig
from offbeat_rollout_torch import TorchRolloutEngine
from offbeat_run import RunFolder, summarize
from offbeat_testing import CommandLine


def group(group_id: int, lengths: list[int], rewards: list[float], num_turns: int = 1) -> SampledGroup:
    rng = np.random.default_rng(group_id)
    completions = [
        Completion(
            ids=rng.integers(3, 50, length).astype(np.int32),
            logprobs=-rng.random(length).astype(np.float32),
            segments=(VersionSegment(version=group_id, num_tokens=1), VersionSegment(version=9, num_tokens=length - 1)),
            stop_reason="eos",
            text=f"sample {length}",
        )
        for length in lengths
    ]
    return SampledGroup(
        group_id=group_id,
        item=group_id + 100,
        prompt_ids=np.arange(5, dtype=np.int32),
        trajectories=[_trajectory(completion, num_turns) for completion in completions],
        rewards=rewards,
        parts=[{"exact_match": reward} for reward in rewards],
    )


def _trajectory(completion: Completion, num_turns: int) -> Trajectory:
    """Turns that all say the same, with three tokens read between them."""
    reply = Reply(ids=np.array([60, 61, 62], np.int32), text="reply")
    return Trajectory(turns=(completion,) * num_turns, replies=(reply,) * (num_turns - 1), ended="max_turns")


class FixedLogprobs:
    """Answers `logprobs` only: -1 for every loss token."""

    def logprobs(self, sequences: list[TrainSequence], *, reference: bool = False) -> list[Any]:
        return [-sequence.loss_mask.astype(np.float32) * (2 if reference else 1) for sequence in sequences]


def test_groups_survive_a_checkpoint(tmp_path: Path) -> None:
    groups = [replace(group(3, [2, 5], [0.0, 1.0]), greedy_reward=0.25), group(1, [4], [0.5], num_turns=3)]
    save_groups(tmp_path, groups)
    read = load_groups(tmp_path)
    assert sorted(read) == [1, 3]
    for before in groups:
        after = read[before.group_id]
        assert (after.item, after.rewards, after.parts) == (before.item, before.rewards, before.parts)
        assert (after.greedy_reward, after.group_id) == (before.greedy_reward, before.group_id)
        np.testing.assert_array_equal(after.prompt_ids, before.prompt_ids)
        for old, new in zip(before.trajectories, after.trajectories, strict=True):
            np.testing.assert_array_equal(new.ids, old.ids)
            np.testing.assert_array_equal(new.loss_mask, old.loss_mask)
            np.testing.assert_array_equal(new.logprobs, old.logprobs)
            assert len(new.turns) == len(old.turns)
            assert (new.segments, new.ended, new.text) == (old.segments, old.ended, old.text)
            assert new.stop_reason == old.stop_reason


def branched(group_id: int) -> SampledGroup:
    """Two samples, of three trajectories and of one; each has a prompt of its own."""
    plain = group(group_id, [2, 3, 1, 4], [1.0, 1.0, 1.0, 0.0])
    prompts = [np.arange(number + 2, dtype=np.int32) for number in range(4)]
    own = [replace(each, prompt_ids=ids) for each, ids in zip(plain.trajectories, prompts, strict=True)]
    return replace(plain, trajectories=own, sizes=[3, 1], rewards=[1.0, 0.0], parts=plain.parts[2:])


def test_a_sample_of_several_trajectories_survives_a_checkpoint(tmp_path: Path) -> None:
    save_groups(tmp_path, [branched(3)])
    read = load_groups(tmp_path)[3]
    assert (read.sample_sizes, read.rewards) == ([3, 1], [1.0, 0.0])
    assert [len(each.prompt_ids) for each in read.trajectories if each.prompt_ids is not None] == [2, 3, 4, 5]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "opo"])
def test_all_trajectories_of_a_sample_have_its_advantage(advantage: str) -> None:
    """That of a sample as long as all of them together."""
    config = AlgorithmConfig(advantage=advantage)
    whole = group(4, [6, 4], [1.0, 0.0])
    [sequences], _ = build_batches([branched(4)], config, FixedLogprobs(), 1)  # type: ignore[arg-type]
    [expected], _ = build_batches([whole], config, FixedLogprobs(), 1)  # type: ignore[arg-type]

    def values(found: list[TrainSequence]) -> list[float]:
        return [float(value) for each in found for value in each.extras["advantages"][each.loss_mask]]

    assert [len(each.ids) for each in sequences] == [4, 6, 5, 9]
    assert values(sequences) == pytest.approx(values(expected))
    assert len(set(values(sequences)[:6])) == 1


def test_no_groups_survive_a_checkpoint_either(tmp_path: Path) -> None:
    save_groups(tmp_path, [])
    assert load_groups(tmp_path) == {}


def test_a_batch_holds_every_token_once_with_its_advantage() -> None:
    groups = [group(0, [3, 2], [1.0, 0.0]), group(1, [1, 4], [0.0, 0.0])]
    [sequences], _ = build_batches(groups, AlgorithmConfig(advantage="dr_grpo"), FixedLogprobs(), 1)  # type: ignore[arg-type]
    completions = [trajectory.turns[0] for each in groups for trajectory in each.trajectories]
    for sequence, completion, advantage in zip(sequences, completions, [0.5, -0.5, 0.0, 0.0], strict=True):
        mask = sequence.loss_mask
        np.testing.assert_array_equal(sequence.ids[mask], completion.ids)
        np.testing.assert_allclose(sequence.extras["rollout_logprobs"][mask], completion.logprobs)
        np.testing.assert_allclose(sequence.extras["old_logprobs"][mask], -1.0)
        np.testing.assert_allclose(sequence.extras["advantages"][mask], advantage)
        assert not sequence.extras["advantages"][~mask].any()


def test_a_penalty_is_the_divergence_from_the_first_policy_at_every_token() -> None:
    """In the reward it is subtracted before the baseline: log-probability -1 here, -2 of the first policy."""
    config = AlgorithmConfig(advantage="dr_grpo", kl_coefficient=0.1, kl_in="reward")
    groups = [group(0, [3, 2], [1.0, 0.0])]
    [sequences], _ = build_batches(groups, config, FixedLogprobs(), 1)  # type: ignore[arg-type]
    wanted = (1.0 - 3 * 0.1 - (0.0 - 2 * 0.1)) / 2
    for sequence, advantage in zip(sequences, [wanted, -wanted], strict=True):
        np.testing.assert_allclose(sequence.extras["ref_logprobs"][sequence.loss_mask], -2.0)
        np.testing.assert_allclose(sequence.extras["advantages"][sequence.loss_mask], advantage, rtol=1e-5)


def test_remax_compares_each_sample_with_the_greedy_one_of_its_own_prompt() -> None:
    groups = [replace(group(n, [2, 2], [1.0, 0.0]), greedy_reward=greedy) for n, greedy in enumerate((0.25, 0.75))]
    [sequences], _ = build_batches(groups, AlgorithmConfig(advantage="remax"), FixedLogprobs(), 1)  # type: ignore[arg-type]
    found = [set(each.extras["advantages"][each.loss_mask].tolist()) for each in sequences]
    assert found == [{0.75}, {-0.25}, {0.25}, {-0.75}]


def test_the_only_step_of_an_update_asks_the_engine_for_nothing() -> None:
    class NotAsked:
        def logprobs(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the ratio is 1 by construction")

    groups = [group(0, [3, 2], [1.0, 0.0])]
    [sequences], _ = build_batches(groups, AlgorithmConfig(), NotAsked(), 1, single_step=True)  # type: ignore[arg-type]
    assert all("old_logprobs" not in sequence.extras for sequence in sequences)


def test_what_an_environment_says_is_read_and_never_learned() -> None:
    config = AlgorithmConfig(advantage="dr_grpo", correction="sequence_tis")
    [first, second] = [group(0, [3, 2], [1.0, 0.0], num_turns=num_turns) for num_turns in (1, 3)]
    [[plain, _]], _ = build_batches([first], config, FixedLogprobs(), 1)  # type: ignore[arg-type]
    [[sequence, _]], _ = build_batches([second], config, FixedLogprobs(), 1)  # type: ignore[arg-type]
    said = plain.ids[plain.loss_mask].tolist()
    reply = [60, 61, 62]
    assert sequence.ids.tolist() == [0, 1, 2, 3, 4, *said, *reply, *said, *reply, *said]
    assert sequence.loss_mask.tolist() == [False] * 5 + [*[True] * 3, *[False] * 3] * 2 + [True] * 3
    for name, values in sequence.extras.items():
        assert not values[~sequence.loss_mask].any(), name
    np.testing.assert_allclose(sequence.extras["advantages"][sequence.loss_mask], 0.5)
    rollout = sequence.extras["rollout_logprobs"][sequence.loss_mask]
    np.testing.assert_allclose(rollout, np.tile(plain.extras["rollout_logprobs"][plain.loss_mask], 3))
    # One ratio for the whole trajectory, over the sampled tokens of all its turns.
    weight = min(np.exp((-1.0 - rollout).sum()), 2.0)
    np.testing.assert_allclose(sequence.extras["correction_weights"][sequence.loss_mask], weight, rtol=1e-5)


def test_lag_counts_from_the_oldest_turn() -> None:
    assert group(4, [3], [1.0], num_turns=3).oldest_version == 4


def test_lag_of_a_group_counts_from_its_oldest_trajectory() -> None:
    old, new = group(3, [2], [1.0]), group(5, [2], [0.0])
    for trajectories in (old.trajectories + new.trajectories, new.trajectories + old.trajectories):
        assert replace(old, trajectories=trajectories, rewards=[1.0, 0.0]).oldest_version == 3


def test_what_is_written_of_an_update_counts_lags_against_the_policy_before_it(config: Path, tmp_path: Path) -> None:
    written: list[tuple[int, dict[str, Any]]] = []

    class Log:
        def write(self, step: int, values: dict[str, Any]) -> None:
            written.append((step, values))

        def write_generations(self, generations: Any) -> None:
            assert [each.step for each in generations] == [9, 9]

    chosen = load_config(config, GrpoConfig, ["--log.train_generations=8"])
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        logger: Any = RunLogger(run, chosen, num_updates=20)
        logger._log, logger._mismatch_alarm = Log(), MismatchAlarm(None)
        logger._cut_off_alarm = CutOffAlarm(chosen)
        groups = [group(8, [2, 3], [1.0, 0.0]), group(6, [2, 2], [0.0, 0.0])]  # numbers, and versions, of before
        prompts = {each.item: Prompt(index=0, ids=each.prompt_ids, text="") for each in groups}
        shares = BusyShares(wall_s=3.0, trainer_idle=0.5, rollout_idle=0.25, overlap=0.1)
        logger.updated(9, groups, prompts, {}, shares, Statistics(filtered=4), {}, {"rollout/aborted": 2})
    [(step, values)] = written
    assert (step, logger.version) == (9, 9)
    assert values["async/lag_histogram"] == [1.0, 0.0, 1.0]
    wanted = {"train/lag_max": 2, "train/lag_mean": 1, "train/reward": 0.25, "train/response_tokens": 2.25}
    wanted |= {
        "perf/tokens_per_s": 3,
        "perf/samples_per_s": 4 / 3,
        "groups/filtered": 4,
        "rollout/aborted": 2,
        "async/trainer_idle_share": 0.5,
    }
    assert {name: values[name].value for name in wanted} == pytest.approx(wanted)


def test_what_is_said_of_waits_and_of_samples_left_out_is_not_said_all_the_time(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, shown = [1000.0], list[str]()
    monkeypatch.setattr("grpo_async_app._run.log.run_logger.clock_s", lambda: now_s[0])
    with RunFolder.create(tmp_path / "run") as run:
        logger: Any = RunLogger(run, load_config(config, GrpoConfig), num_updates=20)
        with logger.opened(-1):
            monkeypatch.setattr(logger._opened, "message", shown.append)
            for idle_s in range(0, 300, 10):  # at each look
                now_s[0] += 10.0
                logger.waiting("rollout-0.generate", float(idle_s))
            assert [text.partition(":")[0] for text in shown] == [f"nothing moved for {n} s" for n in (120, 180, 240)]
            shown.clear()
            for total in range(1, 10):
                logger.left_out({"reward/dropped": total}, "no number")
    assert [text.split()[3] for text in shown] == ["1", "2", "4", "8"]


def test_what_a_sample_has_read_is_told_apart_from_what_it_has_said() -> None:
    """Each reply has three tokens."""
    found = _turn_metrics([group(0, [3, 2], [1.0, 0.0], num_turns=3), group(1, [4], [1.0])])
    values = {name: metric.value for name, metric in found.items()}
    assert values == {"train/turns": 7 / 3, "train/read_tokens": 4.0, "train/trajectories": 1.0}


def test_parts_of_a_loss_are_means_over_the_steps_of_an_update_as_the_loss_is() -> None:
    """Within a step the parts of micro-batches add up; so do not the steps."""
    step = {"loss": Metric(value=3.0, how="sum"), "loss/policy": Metric(value=3.0, how="sum")}
    update = merge_metrics([_named(step), _named(step)])
    assert (update["train/loss"].value, update["train/loss_policy"].value) == (3.0, 3.0)


def test_the_clip_fraction_counts_every_side_of_the_clip() -> None:
    sides = {f"policy/clip_{side}": Metric(value=share, weight=8.0) for side, share in (("low", 0.1), ("high", 0.3))}
    named = _named({"loss": Metric(value=1.0), **sides})["train/clip_fraction"]
    assert (named.value, named.weight) == (pytest.approx(0.4), 8.0)


def test_mini_batches_split_by_group() -> None:
    groups = [group(n, [2, 2], [0.0, 1.0]) for n in range(5)]
    parts, _ = build_batches(groups, AlgorithmConfig(correction_form="bypass"), FixedLogprobs(), 2)  # type: ignore[arg-type]
    assert [len(part) for part in parts] == [6, 4]
    ids = [sequence.ids[sequence.loss_mask].tolist() for part in parts for sequence in part]
    assert ids == [trajectory.turns[0].ids.tolist() for each in groups for trajectory in each.trajectories]


def test_corrections_reach_the_loss() -> None:
    config = AlgorithmConfig(correction="sequence_tis_geometric_rs", rs_low=0.5, rs_high=1.5)
    [[sequence, _]], metrics = build_batches([group(0, [3, 2], [1.0, 0.0])], config, FixedLogprobs(), 1)  # type: ignore[arg-type]
    ratio = np.exp((-1.0 - sequence.extras["rollout_logprobs"][sequence.loss_mask]).sum())
    assert sequence.extras["correction_weights"][sequence.loss_mask] == pytest.approx(min(ratio, 2.0), rel=1e-5)
    assert "correction/share_sequences_rejected" in metrics


def test_shares_of_samples_count_a_sample_once_however_often_it_has_branched() -> None:
    whole = replace(group(0, [2, 3, 2, 2], [1.0, 0.0]), sizes=[3, 1])
    ends = zip(whole.trajectories, ("cut_off", "cut_off", "done", "done"), strict=True)
    branched = replace(whole, trajectories=[replace(trajectory, ended=ended) for trajectory, ended in ends])
    assert _group_metrics([branched], 0)["train/cut_off_share"].value == 0.5
    assert _group_metrics([branched, group(9, [2, 2], [1.0, 0.0])], 0)["train/mixed_version_share"].value == 0.5


def test_a_part_of_the_reward_is_a_mean_over_the_samples_that_were_judged_by_it() -> None:
    """The sources of a mix have rewards of their own; an accident is counted over all samples."""
    parts = [{"math_verify": 1.0}, {"math_verify": 0.5}], [{"number_match": 1.0}, {"number_match": 0.0, "failed": 1.0}]
    groups = [replace(group(at, [3, 2], [1.0, 0.0]), parts=each) for at, each in enumerate(parts)]
    found = {name: each for name, each in _group_metrics(groups, 0).items() if name.startswith("reward/")}
    assert found == {
        "reward/failed": Metric(value=0.25, weight=4.0),
        "reward/math_verify": Metric(value=0.75, weight=2.0),
        "reward/number_match": Metric(value=0.5, weight=2.0),
    }


def test_an_episode_that_any_limit_has_ended_counts_as_cut_off_in_a_validation(config: Path) -> None:
    """As in training: also where a turn had ended before the limit came, and not where an agent asked for little."""
    asked = resolve(load_config(config, GrpoConfig)).held_out
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="")
    ends = (("done", "eos"), ("done", "length"), ("cut_off", "length"), ("max_tokens", "eos"), ("max_turns", "stop"))
    samples = []
    for ended, reason in ends:
        turn = Completion.join([5], [-1.0], [(0, 1)], cast("StopReason", reason), "x")
        trajectory = Trajectory(turns=(turn,), ended=cast("TrajectoryEnd", ended))
        samples.append(ScoredSample(trajectories=(trajectory,), score=RewardScore(value=1.0, parts={})))
    item = Answered(asked=asked, number=0, prompt=prompt, samples=samples).to_item(0, has_turns=True)
    assert [sample.stop_reason for sample in item.samples] == ["eos", "stop", "length", "length", "length"]
    assert summarize("held-out", 0, [item], num_samples=5).cut_share == 3 / 5


def test_a_vote_is_what_was_scored_also_where_an_agent_has_branched(config: Path) -> None:
    """An agent may print its answer, or give it in the last of its conversations."""
    said = [
        Trajectory.of(Completion.join([5, 6], [-1.0, -1.0], [(0, 2)], reason, text))
        for text, reason in (("plan: 1", "eos"), ("so 2", "length"))
    ]
    one = ScoredSample(trajectories=tuple(said), score=RewardScore(value=1.0, parts={}), answer="so 2")
    asked = resolve(load_config(config, GrpoConfig)).held_out
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="")
    item = Answered(asked=asked, number=0, prompt=prompt, samples=[one]).to_item(0, has_turns=True)
    assert item.samples[0].vote == "2"
    assert item.samples[0].stop_reason == "length"


def test_a_group_says_why_it_cannot_be_trained() -> None:
    assert group(0, [3, 2], [1.0, 0.0]).flaw == ""
    assert "reward" in group(0, [3, 2], [1.0, float("nan")]).flaw
    assert "reward" in replace(group(0, [3, 2], [1.0, 0.0]), greedy_reward=float("inf")).flaw
    assert "log-probability" in replace(group(0, [3], [1.0]), teacher_logprobs=[np.array([np.nan])]).flaw
    assert "without a token" in group(0, [3, 0], [1.0, 0.0]).flaw


class Answering:
    """As much of `Rollouts` and of `Engines` as a validation asks: one engine, and answers of a version each."""

    names = ("rollout-0",)

    def __init__(self, *versions: int) -> None:
        self._versions, self.requests = versions, list[GenerateRequest]()
        self._in_flight, self.in_flight = 0, list[int]()  # samples, after each request

    async def sample(self, _name: str, _prompt: Prompt, request: GenerateRequest, *_: object) -> list[ScoredSample]:
        self.requests.append(request)
        self._in_flight += request.num_samples
        self.in_flight.append(self._in_flight)
        await asyncio.sleep(0)
        self._in_flight -= request.num_samples
        turns = [Completion.join([7], [-1.0], [(version, 1)], "eos", "x") for version in self._versions]
        return [
            ScoredSample(trajectories=(Trajectory.of(each),), score=RewardScore(value=1.0, parts={})) for each in turns
        ]

    def least_loaded(self) -> Any:
        return SimpleNamespace(name=self.names[0])

    def hold(self, _: str) -> AbstractContextManager[None]:
        return nullcontext()


def validated(asked: Answering, settings: GrpoConfig, num_samples: int, version: int) -> Validation:
    prompts = tuple(Prompt(index=at, ids=np.array([1], np.int32), text="") for at in range(4))
    each = replace(resolve(settings).held_out, prompts=prompts, num_samples=num_samples)
    counts: list[int] = []
    found = asyncio.run(
        validate(cast("Rollouts", asked), cast("Engines", asked), settings, [each], version, counts.append)
    )
    assert counts == [1, 2, 3, 4]
    return found


@pytest.mark.parametrize("num_samples", [1, 3])
def test_each_sample_of_a_validation_draws_with_a_seed_of_its_own(config: Path, num_samples: int) -> None:
    asked = Answering()
    validated(asked, load_config(config, GrpoConfig, ["--rollout.seed=7"]), num_samples, version=0)
    assert asked.requests[0].params.seed == 7
    seeds = [request.params.first_seed() + number for request in asked.requests for number in range(num_samples)]
    assert len(set(seeds)) == len(seeds) == 4 * num_samples


@pytest.mark.parametrize(("at_sync", "in_flight"), [("wait", [2, 4, 6, 8]), ("go_on", [2, 4, 2, 4])])
def test_a_validation_beside_training_asks_for_as_much_as_the_engines_decode_and_no_more(
    config: Path, at_sync: str, in_flight: list[int]
) -> None:
    """A sync waits for what is in flight; where training waits instead, engines have as many again to begin with."""
    asked, words = Answering(), [f"--eval.at_sync={at_sync}", "--rollout.max_running=4"]
    validated(asked, load_config(config, GrpoConfig, words), num_samples=2, version=0)
    assert asked.in_flight == in_flight


@pytest.mark.parametrize(("at_sync", "may_differ"), [("wait", False), ("go_on", True)])
def test_answers_of_two_versions_are_no_validation_of_one(config: Path, at_sync: str, may_differ: bool) -> None:
    settings = load_config(config, GrpoConfig, [f"--eval.at_sync={at_sync}"])
    assert validated(Answering(2, 2), settings, 2, version=2).version == 2
    if may_differ:
        assert validated(Answering(2, 3), settings, 2, version=2).version == 2
    else:
        with pytest.raises(OutdatedError, match="version 3 has answered a prompt of the validation of 2"):
            validated(Answering(2, 3), settings, 2, version=2)


def test_the_configuration_stays_small_and_documented() -> None:
    # 120 keys, and the five of the section environment, which no other section could hold: it says what the model acts
    # in, where data says what it is asked and reward how its last words are scored.
    # The rest is for runs on clusters: where roles lie, when a silent one is given up, how often one is started again.
    # A teacher is a model served of its own: where it is, what serves it, on what. Traces: which steps of which roles.
    # Rewards are scored in so many processes: how many a machine can spare, only its user knows.
    # What travels to the engines is chosen by three: adapters or merged weights, all or changed elements, by which way.
    # Where that way is a folder that trainer and engines see, only the user knows which.
    # A critic is a second model to train, with what cannot be the policy's: where it starts, its rate, its λ, its clip.
    # A source of a mix says eleven things of itself; what is too easy or too hard, and how seldom drawn, takes five.
    # A run ends by itself at an accuracy or after a time: two.
    # From which mismatch of trainer and engines on an alarm is given: one.
    # What the peers' users train with takes four: passes over a batch, two answers to samples that a limit has cut off,
    # and the weight of a penalty on samples of other weights.
    # Experts that the engines chose, taken by the trainer or only compared, since both sides have to do it: one.
    check_limits(GrpoConfig, max_keys=243)


def test_the_resolved_configuration_loads_back(config: Path) -> None:
    loaded = load_config(config, GrpoConfig, [])
    assert parse_config(dump_config(loaded), GrpoConfig) == loaded


@pytest.mark.parametrize("cut", ["top_p=0.5", "top_k=3", "min_p=0.2"])
def test_trainer_and_engine_agree_on_log_probabilities_under_a_cut(config: Path, cut: str) -> None:
    settings = load_config(config, GrpoConfig, [f"--rollout.{cut}", "--rollout.temperature=0.7"])
    prompt = np.arange(3, 15, dtype=np.int32)

    async def sample() -> list[Completion]:
        engine = await TorchRolloutEngine.create(settings.rollout_engine(settings.model.path, 1))
        params = replace(settings.rollout.sampling(seed=1), ignore_eos=True)
        completions = await engine.generate(
            GenerateRequest(request_id="1", prompt_ids=prompt, num_samples=4, params=params)
        )
        await engine.close()
        return completions

    completions = asyncio.run(sample())
    trainer = TorchTrainEngine.create(settings.train_engine(settings.model.path, 1, 1))
    sequences = [
        TrainSequence(ids=np.append(prompt, one.ids), loss_mask=np.arange(len(prompt) + len(one.ids)) >= len(prompt))
        for one in completions
    ]
    for one, scored, sequence in zip(completions, trainer.logprobs(sequences), sequences, strict=True):
        np.testing.assert_allclose(one.logprobs, scored[sequence.loss_mask], atol=1e-4)


def test_a_cut_is_refused_where_the_engine_does_not_give_what_the_trainer_scores(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchRolloutEngine, "whole_logprobs", False)
    check_run(load_config(config, GrpoConfig, []))
    with pytest.raises(ConfigError, match=r"rollout\.top_p = 0\.9, .* set them to 1, 0 and 0"):
        check_run(load_config(config, GrpoConfig, ["--rollout.top_p=0.9"]))


def test_the_run_ends_with_its_data_or_its_updates(config: Path) -> None:
    def updates(*overrides: str) -> int:
        return check_run(load_config(config, GrpoConfig, overrides)).num_updates

    num_prompts = len(check_run(load_config(config, GrpoConfig, [])).prompts.train)
    assert updates("--data.epochs=3") == -(-3 * num_prompts // 4)
    assert updates("--data.epochs=0", "--engine.max_updates=7") == 7
    assert updates("--data.epochs=1", "--engine.max_updates=1") == 1


def test_the_trainer_scores_as_the_engines_sample(config: Path) -> None:
    cuts = ["--rollout.top_p=0.9", "--rollout.top_k=5", "--rollout.min_p=0.01", '--rollout.stop=["x"]']
    words = [*cuts, "--rollout.temperature=0.7", "--algorithm.entropy_coefficient=0.1", "--rollout.max_tokens=9"]
    chosen = load_config(config, GrpoConfig, words)
    assert chosen.rollout.sampling(3) == SamplingParams(
        max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, stop=("x",), seed=3, whole_logprobs=True
    )
    assert chosen.train_engine("m", num_updates=5).options == {"temperature": 0.7, "entropy_gradient": True}
    assert load_config(config, GrpoConfig).train_engine("m", num_updates=5).options == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("words", "overlaps"),
    [
        ((), True),
        (("--async.staleness_threshold=0", "--async.partial_rollout=false"), False),
        (
            (
                "--async.staleness_threshold=0",
                "--async.partial_rollout=false",
                "--async.trigger_parameter_sync_step=2",
            ),
            True,
        ),
        (("--cluster.colocate=true",), False),
        (("--eval.at_sync=wait",), False),
        (("--cluster.colocate=true", "--eval.at_sync=go_on"), True),
    ],
)
def test_a_validation_goes_on_while_weights_come_in_the_asynchronous_modes(
    config: Path, words: tuple[str, ...], overlaps: bool
) -> None:
    assert load_config(config, GrpoConfig, words).validation_goes_on is overlaps


def test_a_run_goes_on_with_its_own_prompts_only(config: Path) -> None:
    begun = load_config(config, GrpoConfig, [])
    check_same_data(begun, load_config(config, GrpoConfig, ["--data.epochs=9", "--engine.max_updates=3"]))
    with pytest.raises(ConfigError, match=r"data\.seed was 0 when the run began and would be 5"):
        check_same_data(begun, load_config(config, GrpoConfig, ["--data.seed=5"]))


def test_plan_starts_nothing_and_shows_the_arithmetic(command: CommandLine, config: Path) -> None:
    ended = command("plan", config)
    assert ended.code == 0, ended.err
    assert "4 prompts x 2 samples = 8 samples" in ended.out
    assert "partial" in ended.out


def test_the_help_of_train_lists_the_everyday_settings_with_their_defaults() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "grpo_async_app", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert said.count("\n  --") == len(EVERYDAY) + 4
    assert (
        "--rollout.samples_per_prompt  n: completions of one prompt, which make one group (in samples; default: 8)"
        in said
    )


def test_explain_says_what_a_key_is_for(command: CommandLine) -> None:
    ended = command("--explain", "async.staleness_threshold")
    assert ended.code == 0
    assert "0.5" in ended.out


def test_doctor_names_what_is_missing_and_how_to_get_it(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALL_LINES, ("offbeat.rollout", "far"), "pip install offbeat-rollout-far")
    ended = command("doctor")
    assert ended.code == 0
    missing = [line for (kind, name), line in INSTALL_LINES.items() if name not in installed_backends(kind)]
    assert "pip install offbeat-rollout-far" in missing
    assert all(line in " ".join(ended.out.split()) for line in missing)
    assert "rollout torch" in ended.out
    assert "TensorRT-LLM" not in ended.out  # which needs a GPU


def test_doctor_of_a_file_says_what_it_needs_and_ends_with_2_where_that_is_missing(
    command: CommandLine, config: Path
) -> None:
    ended = command("doctor", config)
    assert (ended.code, "all that the configuration needs is here" in " ".join(ended.out.split())) == (0, True)
    ended = command("doctor", config, "--data.path=none.jsonl")
    assert ended.code == 2
    assert ended.out.startswith("data")
    assert "none.jsonl does not exist" in " ".join(ended.out.split())
