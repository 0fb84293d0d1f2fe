"""The driver between two steps, in process: groups taken in, validations, and the state that a run resumes with."""

import asyncio
import json
import math
import shutil
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._preflight.data import mark_of
from grpo_async_app._roles.groups import SampledGroup, save_groups
from grpo_async_app._run.backend import GrpoBackend, check_same_prompts
from grpo_async_app._run.ending import EarlyEnd, SamplesLostError
from grpo_async_app._run.interruption import Interruption
from grpo_async_app._run.prompt_stream import PromptStream
from grpo_async_app._run.sampling import ScoredSample
from grpo_async_app._run.session import Session, _train_on, find_session
from grpo_async_app._run.validation import Validation
from offbeat_async_policy import AsyncPolicy, GroupResult, Sync, TrainerTurn
from offbeat_core import (
    Completion,
    ConfigError,
    GenerateRequest,
    PeerFailedError,
    RunFolderError,
    Trajectory,
    VersionSegment,
    load_config,
)
from offbeat_data import Prompt, RewardScore
from offbeat_run import Checkpoints, summarize


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def settings(config: Path, *changes: str) -> GrpoConfig:
    return load_config(config, GrpoConfig, ["--rollout.num_engines=2", *changes])


class Notes:
    """Takes what a backend writes down: the seam of `RunLogger`, and of the checkpoints in a `RunFolder`."""

    def __init__(self) -> None:
        self.checkpoints = self

    def worked(self, *_: Any) -> None:
        pass

    def left_out(self, *_: Any) -> None:
        pass

    def set_score(self, version: int, reward: float) -> None:
        raise RunFolderError("no space left on the device")


def open_backend(config: GrpoConfig, fleet: Fleet) -> GrpoBackend:
    notes: Any = Notes()
    policy = AsyncPolicy(config.async_, 8)
    prompt = Prompt(index=0, text="1", ids=(1,), answer="1")
    run = resolve(config)
    [of_data] = run.sources
    return GrpoBackend(
        replace(run, sets=(replace(run.held_out, prompts=(prompt,)),)),
        fleet,
        policy,
        stream=PromptStream(config, [replace(of_data, prompts=(prompt,))], {}),
        folder=notes,
        logger=notes,
        turn=TrainerTurn(),
        early_end=EarlyEnd(config),
    )


def test_a_validation_that_needs_the_trainer_ends_before_colocated_engines_sleep(
    config: Path, model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        fleet = Fleet(resolve(settings(config, "--cluster.colocate=true")), str(model), tmp_path)
        backend, validated = open_backend(settings(config), fleet), list[int]()

        async def waits_for_an_engine_that_gets_weights() -> None:
            async with backend._turn.between_actions():
                validated.append(1)

        for action in ("update", "sync", "checkpoint"):
            backend._validating = asyncio.create_task(waits_for_an_engine_that_gets_weights())
            await backend.prepare(action)  # type: ignore[arg-type]
        assert validated == [1, 1, 1]

    run(scenario)


def test_a_validation_that_cannot_be_written_down_ends_the_run(
    config: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answered(*_: Any) -> Validation:
        return Validation(version=1, answered=[], items={}, summaries=[summarize("held-out", 1, [], 1)])

    async def scenario() -> None:
        backend = open_backend(settings(config), Fleet(resolve(settings(config)), str(model), tmp_path))
        backend._validating = asyncio.create_task(backend._validate(1))
        with pytest.raises(RunFolderError, match="no space left"):
            await backend.finish()

    monkeypatch.setattr("grpo_async_app._run.backend.validate", answered)
    run(scenario)


def test_the_greedy_sample_ends_and_is_worth_as_the_others_do(config: Path, model: Path, tmp_path: Path) -> None:
    """ReMax subtracts it: the penalty for length, and where a sample stops, must be the same."""
    words = ['--rollout.stop=["x"]', "--algorithm.advantage=remax", "--algorithm.overlong_buffer_tokens=4"]
    chosen = load_config(config, GrpoConfig, words)
    requests: list[GenerateRequest] = []
    long = Completion(
        ids=np.arange(8, dtype=np.int32),
        logprobs=np.zeros(8, np.float32),
        segments=(VersionSegment(version=0, num_tokens=8),),
        stop_reason="length",
    )

    async def scenario() -> None:
        backend = open_backend(chosen, Fleet(resolve(chosen), str(model), tmp_path))

        async def sample(_name: str, _prompt: Prompt, request: GenerateRequest, *_: str) -> list[ScoredSample]:
            requests.append(request)
            return [ScoredSample(trajectories=(Trajectory.of(long),), score=RewardScore(value=1.0, parts={}))]

        backend._rollouts.sample = sample  # type: ignore[method-assign]
        draw = backend._stream.draw(0)
        greedy = await backend._sample_greedy(3, draw, "rollout-0")
        assert greedy is not None
        assert backend._worth(greedy, draw) == 0.0, "a whole buffer over: the reward less the factor of 1"

    run(scenario)
    assert requests[0].params.stop == ("x",)


def completion(num_tokens: int) -> Completion:
    return Completion.join([5] * num_tokens, [-1.0] * num_tokens, [(0, num_tokens)], "eos", "x")


def is_filtered(
    config: GrpoConfig, model: Path, folder: Path, samples: list[ScoredSample], greedy: ScoredSample | None = None
) -> bool:
    """Return whether the group of these samples is left out of training."""
    found: list[bool] = []

    async def scenario() -> None:
        backend = open_backend(config, Fleet(resolve(config), str(model), folder))
        found.append((await backend._take_in(0, backend._stream.draw(0), samples, greedy)).filtered)

    run(scenario)
    return found[0]


def scored(value: float, num_tokens: int = 3, **parts: float) -> ScoredSample:
    return ScoredSample(
        trajectories=(Trajectory.of(completion(num_tokens)),), score=RewardScore(value=value, parts=parts)
    )


def test_wrong_answers_of_different_lengths_are_filtered(config: Path, model: Path, tmp_path: Path) -> None:
    """As DAPO does: the penalty for length makes their rewards differ, and none of them is right."""
    words = ["--algorithm.filter_groups=true", "--algorithm.overlong_buffer_tokens=8", "--rollout.max_tokens=8"]
    chosen = settings(config, *words, "--rollout.samples_per_prompt=4")
    wrong = [scored(0.0, num_tokens) for num_tokens in (1, 8, 4, 2)]
    assert is_filtered(chosen, model, tmp_path, wrong)
    assert not is_filtered(chosen, model, tmp_path, [*wrong[1:], scored(1.0)])


def test_a_prompt_succeeds_by_its_reward_before_anything_is_taken_off_for_length(
    config: Path, model: Path, tmp_path: Path
) -> None:
    chosen, learned = settings(config, "--algorithm.overlong_buffer_tokens=8"), list[list[float]]()

    async def scenario() -> None:
        backend = open_backend(chosen, Fleet(resolve(chosen), str(model), tmp_path))
        backend._stream.record = lambda _, rewards: learned.append([*rewards])  # type: ignore[method-assign]
        await backend._take_in(0, backend._stream.draw(0), [scored(1.0, 8), scored(0.5, 1)], None)
        assert backend._groups[0].rewards == [0.0, 0.375], "a whole buffer over, and an eighth of it"

    run(scenario)
    assert learned == [[1.0, 0.5]]


GDPO = ("--algorithm.advantage=gdpo", "--reward.name=", "--reward.weights={number_match = 1.0, contains = 2.0}")


def test_a_group_that_gdpo_learns_from_is_not_filtered(config: Path, model: Path, tmp_path: Path) -> None:
    chosen = settings(config, "--algorithm.filter_groups=true", *GDPO)
    right, short = scored(1.0, number_match=1.0, contains=0.0), scored(1.0, number_match=0.0, contains=0.5)
    assert not is_filtered(chosen, model, tmp_path, [right, short])
    assert is_filtered(chosen, model, tmp_path, [right, right])


def test_samples_without_the_parts_that_gdpo_learns_from_are_left_out_and_told_of(
    config: Path, model: Path, tmp_path: Path
) -> None:
    """An agent may post its own reward: without the named parts each advantage would be 0, and nothing learned."""
    chosen = settings(config, *GDPO)
    named, other, bare = scored(1.0, number_match=1.0, contains=0.0), scored(0.5, tests=1.0), scored(0.5)

    async def scenario() -> None:
        backend = open_backend(chosen, Fleet(resolve(chosen), str(model), tmp_path))
        assert (await backend._take_in(0, backend._stream.draw(0), [named, other, bare], None)).filtered
        assert backend._rollouts.left_out == {"reward/missing_parts": 2}
        assert "lacks number_match, contains" in backend._rollouts.last_left_out
        assert not (await backend._take_in(1, backend._stream.draw(1), [named, other, named], None)).filtered
        assert backend._groups[1].parts == [named.score.parts] * 2

    run(scenario)


def test_remax_filters_by_the_greedy_sample_too(config: Path, model: Path, tmp_path: Path) -> None:
    chosen = settings(config, "--algorithm.filter_groups=true", "--algorithm.advantage=remax")
    samples = [scored(1.0), scored(1.0)]
    assert not is_filtered(chosen, model, tmp_path, samples, scored(0.0))
    assert is_filtered(chosen, model, tmp_path, samples, scored(1.0))


def test_a_group_whose_greedy_sample_failed_is_not_compared_with_a_reward_of_0(
    config: Path, model: Path, tmp_path: Path
) -> None:
    samples = [scored(1.0), scored(0.5)]
    assert is_filtered(settings(config, "--algorithm.advantage=remax"), model, tmp_path, samples, greedy=None)
    assert not is_filtered(settings(config), model, tmp_path, samples, greedy=None)


def test_a_group_of_which_nothing_is_in_the_loss_is_filtered(config: Path, model: Path, tmp_path: Path) -> None:
    words = ["--algorithm.filter_groups=true", "--algorithm.mask_truncated=true"]
    cut = [replace(scored(value), trajectories=(cut_off(),)) for value in (1.0, 0.0)]
    assert is_filtered(settings(config, *words), model, tmp_path, cut)
    assert not is_filtered(settings(config, *words), model, tmp_path, [cut[0], scored(0.0)])
    assert not is_filtered(settings(config, words[0]), model, tmp_path, cut)


def cut_off() -> Trajectory:
    return replace(Trajectory.of(completion(3)), ended="cut_off")


def test_a_reward_that_is_no_number_is_counted_as_untrainable_before_it_is_filtered(
    config: Path, model: Path, tmp_path: Path
) -> None:
    assert is_filtered(
        settings(config, "--algorithm.filter_groups=true"), model, tmp_path, [scored(math.nan), scored(0.0)]
    )


def test_no_two_samples_of_a_run_draw_with_the_same_seed(config: Path, model: Path, tmp_path: Path) -> None:
    """Sample i of a request draws with its seed plus i; another rollout.seed makes another run."""
    requests: list[GenerateRequest] = []

    async def scenario(chosen: GrpoConfig) -> None:
        backend = open_backend(chosen, Fleet(resolve(chosen), str(model), tmp_path))

        async def sample(_name: str, _prompt: Prompt, request: GenerateRequest, *_: str) -> list[ScoredSample]:
            requests.append(request)
            return []

        backend._rollouts.sample = sample  # type: ignore[method-assign]
        for group_id in range(5):
            await backend._sample(group_id, backend._stream.draw(group_id), "rollout-0")

    for seed in (0, 1):
        chosen = settings(config, "--rollout.samples_per_prompt=4", f"--rollout.seed={seed}")
        run(partial(scenario, chosen))
    seeds = [request.params.first_seed() + number for request in requests for number in range(request.num_samples)]
    assert len(set(seeds)) == len(seeds) == 2 * 20


def of_versions(*versions: int) -> ScoredSample:
    """A sample whose tokens are of these versions, one each."""
    turn = Completion.join([5] * len(versions), [-1.0] * len(versions), [(each, 1) for each in versions], "eos", "x")
    return ScoredSample(trajectories=(Trajectory.of(turn),), score=RewardScore(value=1.0, parts={}))


def test_a_group_is_as_old_as_its_oldest_token(config: Path, model: Path, tmp_path: Path) -> None:
    """By this the policy bounds the lag: not by what is in training when the group comes back."""
    chosen, found = settings(config), list[GroupResult]()

    async def scenario() -> None:
        backend = open_backend(chosen, Fleet(resolve(chosen), str(model), tmp_path))
        backend._policy.statistics.updates = 7
        samples = [of_versions(5, 6), of_versions(4, 7)]
        found.append(await backend._take_in(0, backend._stream.draw(0), samples, None))
        assert list(backend._groups) == [0]

    run(scenario)
    assert found == [GroupResult(oldest_version=4)]


@pytest.mark.parametrize(
    ("asked_for", "left", "is_trained"), [(4, 2, True), (4, 1, False), (1, 1, True), (1, 0, False)]
)
def test_a_group_is_trained_while_enough_of_it_is_left_to_compare(
    config: Path, model: Path, tmp_path: Path, asked_for: int, left: int, is_trained: bool
) -> None:
    chosen = settings(config, f"--rollout.samples_per_prompt={asked_for}", "--algorithm.advantage=remax")
    assert is_filtered(chosen, model, tmp_path, [scored(1.0)] * left, scored(0.0)) is not is_trained


def test_a_group_that_is_dropped_is_aborted_where_it_is_in_flight_alone(
    config: Path, model: Path, tmp_path: Path
) -> None:
    aborted: list[str] = []

    async def scenario() -> None:
        fleet = Fleet(resolve(settings(config)), str(model), tmp_path)
        backend = open_backend(settings(config), fleet)

        async def abort(request_id: str) -> None:
            aborted.append(request_id)

        fleet.engines.abort = abort  # type: ignore[method-assign]
        await backend._take_in(3, backend._stream.draw(3), [scored(1.0), scored(0.0)], None)
        await backend.drop(3)
        assert aborted == []
        assert backend._groups == {}
        await backend.drop(4)

    run(scenario)
    assert aborted == ["group-4"]


def test_an_engine_that_comes_up_between_two_syncs_gets_the_version_that_the_trainer_holds(
    config: Path, model: Path, tmp_path: Path
) -> None:
    offered: list[int] = []

    async def scenario() -> None:
        fleet = Fleet(resolve(settings(config)), str(model), tmp_path)
        backend = open_backend(settings(config), fleet)
        logger, trainer = cast("Any", backend._logger), SimpleNamespace()

        async def call(*_: Any, **__: Any) -> dict[str, Any]:
            return {}

        async def sync_late(name: str, offer: int) -> None:
            offered.append(offer)
            fleet.engines._without_weights.task_done()

        logger.updated = lambda *_: None
        trainer.call, trainer.reporting_progress = call, lambda _: nullcontext()
        fleet._trainer = cast("Any", trainer)
        fleet.offer_weights = lambda version: version  # type: ignore[method-assign, assignment, return-value]
        fleet.engines.sync_late = sync_late  # type: ignore[method-assign, assignment]
        await backend._take_in(3, backend._stream.draw(3), [scored(1.0), scored(0.0)], None)
        await backend.update((3,), 0)
        fleet.engines._without_weights.put_nowait("rollout-1")
        await fleet.engines._without_weights.join()
        await backend.close()

    run(scenario)
    assert offered == [1]


def test_a_run_goes_on_with_the_very_prompts_of_its_checkpoint() -> None:
    begun = [Prompt(index=at, text=str(at), ids=np.array([at + 1], np.int32), answer="1") for at in range(3)]
    state = {"prompts": mark_of(begun)}
    check_same_prompts(state, begun, Path("run"))
    check_same_prompts({}, begun, Path("run"))  # an older checkpoint has none
    other = [*begun[:2], Prompt(index=2, text="other", ids=np.array([9], np.int32), answer="1")]
    for prompts in (begun[:2], other):
        with pytest.raises(ConfigError, match="some would be trained twice and others never"):
            check_same_prompts(state, prompts, Path("run"))


@pytest.mark.parametrize(
    ("last", "version", "is_due"),
    [
        (-1, 0, True),
        (0, 1, False),
        (0, 2, True),
        (1, 2, True),
        (2, 3, False),
        (2, 5, True),
        (3, 5, True),
        (4, 5, False),
    ],
)
def test_a_validation_is_due_once_in_so_many_updates_also_where_syncs_pass_over_them(
    config: Path, model: Path, tmp_path: Path, last: int, version: int, is_due: bool
) -> None:
    async def scenario() -> None:
        chosen = settings(config, "--eval.every_updates=2")
        backend = open_backend(chosen, Fleet(resolve(chosen), str(model), tmp_path))
        cast("Any", backend._logger).last_validated = last
        assert backend._validation_is_due(version) is is_due

    run(scenario)


def opened_session(config: Path, folder: Path, loop: Path | None) -> Session:
    """Weights, versions and groups with which a run begins or resumes."""
    preflight: Any = SimpleNamespace(
        config=settings(config), num_groups=8, max_updates=None, prompts=SimpleNamespace(train=[])
    )
    checkpoints = Checkpoints(folder / "checkpoints")
    if loop is not None:
        with checkpoints.write(3) as checkpoint:
            shutil.copytree(loop, checkpoint / "loop")
    return Session.from_latest(preflight, cast("Any", SimpleNamespace(path=folder, checkpoints=checkpoints)))


def test_before_anything_is_sampled_the_engines_prove_that_they_hold_the_trainers_weights(
    config: Path, tmp_path: Path
) -> None:
    session = opened_session(config, tmp_path, None)
    assert session.policy.actions() == [Sync(version=0, interrupt=False)]
    assert (session.step, session.folder) == (-1, None)


def test_a_run_whose_checkpoints_have_no_optimizer_is_not_resumed(config: Path, tmp_path: Path) -> None:
    preflight: Any = SimpleNamespace(config=settings(config, "--checkpoint.save_optimizer=false"))
    run: Any = SimpleNamespace(path=tmp_path)
    with pytest.raises(RunFolderError, match=r"checkpoint\.save_optimizer = false: it cannot be resumed"):
        find_session(preflight, run)


def test_groups_of_a_checkpoint_that_cannot_be_trained_on_are_replaced(config: Path, tmp_path: Path) -> None:
    """As a run of before rewards were looked at has them."""
    policy, loop = AsyncPolicy(settings(config).async_, 8), tmp_path / "loop"
    policy.actions()
    for group_id in (0, 1):
        policy.group_finished(group_id, 0)
    loop.mkdir()
    (loop / "state.json").write_text(json.dumps({"policy": policy.state()}))
    save_groups(loop, [sampled(0, 1.0), sampled(1, math.inf)])
    session = opened_session(config, tmp_path, loop)
    assert list(session.groups) == [0]
    state = session.policy.state()
    assert [group_id for group_id, _ in state["finished"]] == [0]
    assert state["statistics"]["filtered"] == 1
    assert (session.step, session.folder) == (3, tmp_path / "checkpoints" / "step-000003")


def sampled(group_id: int, reward: float) -> SampledGroup:
    return SampledGroup(
        group_id=group_id,
        item=0,
        prompt_ids=np.array([1], np.int32),
        trajectories=[Trajectory.of(completion(2))] * 2,
        rewards=[reward, 0.0],
        parts=[{}, {}],
    )


def test_the_time_of_a_run_does_not_begin_anew_with_another_trainer(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, given = opened_session(config, tmp_path, None), list[EarlyEnd]()
    killed = PeerFailedError("trainer-0", "its process was killed by SIGKILL")

    async def start(*_: Any) -> None:
        pass

    async def go_on(*arguments: Any) -> None:
        given.append(arguments[3])
        if len(given) < 3:
            raise killed

    async def death() -> PeerFailedError:
        return killed

    monkeypatch.setattr("grpo_async_app._run.session._start", start)
    monkeypatch.setattr("grpo_async_app._run.session._go_on", go_on)
    monkeypatch.setattr(Session, "from_latest", staticmethod(lambda *_: session))
    fleet: Any = SimpleNamespace(trainer_death=death)
    logger: Any = SimpleNamespace(opened=lambda _: nullcontext())
    asyncio.run(_train_on(session, fleet, logger, Interruption()))
    assert len(given) == 3
    assert len(set(map(id, given))) == 1


def test_samples_that_failed_fail_a_run_only_where_they_are_why_it_has_ended(
    config: Path, model: Path, tmp_path: Path
) -> None:
    def opened(*words: str) -> GrpoBackend:
        backend = open_backend(settings(config, *words), Fleet(resolve(settings(config)), str(model), tmp_path))
        logger: Any = backend._logger
        logger.last_accuracy, logger.last_validated = None, 0
        backend._rollouts.skip("reward/dropped", "no bread today")
        return backend

    async def scenario() -> None:
        out_of_time = opened("--engine.max_time_s=1e-9")
        out_of_time._policy.end_early(out_of_time.wants_end())
        assert out_of_time.why_ended_early.startswith("the time limit")
        out_of_time.raise_if_lost()
        with pytest.raises(SamplesLostError, match=r"no update was made; left out: 1 reward/dropped.*no bread today"):
            opened().raise_if_lost()

    run(scenario)
