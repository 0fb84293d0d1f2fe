"""A teacher beside the run: its scores reach the loss, its death loses nothing, its place is planned."""

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from role_faults import accounting_complaints, last_value, role_pids, signal_role, updates

from grpo_async_app._commands.shrink import shrink_run
from grpo_async_app._config.resolved import resolve
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.placement import place_run
from grpo_async_app._preflight.preflight import check_run
from grpo_async_app._preflight.settings import check_settings
from grpo_async_app._roles import teacher as teacher_role
from grpo_async_app._roles.batches import build_batches
from grpo_async_app._roles.groups import SampledGroup, load_groups, save_groups
from grpo_async_app._roles.teacher import TeacherRole
from offbeat_core import (
    Completion,
    ConfigError,
    Reply,
    RolloutEngineConfig,
    TrainSequence,
    Trajectory,
    VersionSegment,
    load_config,
)
from offbeat_objectives import AlgorithmConfig
from offbeat_placement import ClusterView, Node, grid_nodes
from offbeat_run import read_metrics, read_timeline
from offbeat_testing import FakeRolloutEngine, RunningCommand, tiny_model

Main = Callable[[], object]
NUM_TRAIN = 20


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher: another model with the same tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7, hidden_size=32)


@pytest.fixture
def words(taught: Path) -> list[str]:
    """A run that learns from the teacher alone."""
    return [
        f"--teacher.path={taught}",
        "--algorithm.advantage=none",
        "--algorithm.distillation_coefficient=1",
        "--eval.every_updates=0",
    ]


@pytest.mark.nightly
def test_a_policy_comes_nearer_to_its_teacher(
    forked_main: Main, config: Path, tmp_path: Path, words: list[str]
) -> None:
    run = tmp_path / "run"
    more = ["--data.epochs=8", "--engine.learning_rate=1e-2", "--rollout.max_tokens=16", "--teacher.num_replicas=2"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words, *more) as process:
        assert process.wait() == 0, process.output
        assert "2 x teacher (torch, auto, apart, 1 threads)" in " ".join(process.output.split())
    assert accounting_complaints(run, NUM_TRAIN, 8, per_update=4) == []
    divergence = [line.values["distillation/kl"] for line in read_metrics(run / "metrics.jsonl")]
    assert len(divergence) == 40
    assert np.mean(divergence[-10:]) < 0.7 * np.mean(divergence[:5]), divergence
    events = read_timeline(run / "timeline.json")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    scored = {tracks[event["tid"]] for event in events if event["ph"] == "X" and event["name"] == "score"}
    assert scored == {"teacher-0", "teacher-1"}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.nightly),
    ],
)
def test_a_teacher_that_dies_or_stops_answering_is_started_again_and_nothing_is_lost(
    forked_main: Main, config: Path, tmp_path: Path, words: list[str], number: signal.Signals
) -> None:
    run = tmp_path / "run"
    more = ["--data.epochs=5", "--cluster.silent_after_s=10"]  # longer than others are silent on a crowded machine
    with RunningCommand(forked_main, "train", config, "--out", run, *words, *more) as process:
        process.wait_until(lambda: len(updates(run)) >= 3, "3 updates")
        gone = signal_role(process, "teacher-0", number)
        process.wait_until(lambda: role_pids(process).get("teacher-0", gone) != gone, "a new teacher")
        assert process.wait() == 0, process.output
        assert "teacher-0: " in process.output
    assert accounting_complaints(run, NUM_TRAIN, 5, per_update=4) == []
    assert last_value(run, "teacher/restarts") == 1.0
    assert last_value(run, "groups/reissued") == 0.0, "the samples were there: only their scores were asked for again"


@pytest.mark.nightly
def test_a_teacher_that_dies_again_and_again_ends_the_run_with_its_cause(
    forked_main: Main, config: Path, tmp_path: Path, words: list[str]
) -> None:
    run = tmp_path / "run"
    more = ["--data.epochs=100", "--cluster.max_restarts=0"]
    with RunningCommand(forked_main, "train", config, "--out", run, *words, *more) as process:
        process.wait_until(lambda: len(updates(run)) >= 1, "an update")
        signal_role(process, "teacher-0", signal.SIGKILL)
        assert process.wait() == 3, process.output
        assert "teacher-0 failed" in process.output
        assert "cluster.max_restarts = 0 allows no more" in process.output


class FixedLogprobs:
    """Answers `logprobs` only: -1 for every loss token."""

    def logprobs(self, sequences: list[TrainSequence], *, reference: bool = False) -> list[Any]:
        return [np.where(sequence.loss_mask, -1.0, 0.0).astype(np.float32) for sequence in sequences]


def taught_group() -> SampledGroup:
    """Two samples of two turns each, and what a teacher says to their sampled tokens."""
    turn = Completion(
        ids=np.array([7, 8], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        segments=(VersionSegment(version=1, num_tokens=2),),
        stop_reason="eos",
    )
    trajectory = Trajectory(turns=(turn, turn), replies=(Reply(ids=np.array([60], np.int32)),))
    return SampledGroup(
        group_id=3,
        item=0,
        prompt_ids=np.arange(3, dtype=np.int32),
        trajectories=[trajectory, trajectory],
        rewards=[1.0, 0.0],
        parts=[{}, {}],
        teacher_logprobs=[np.array([-1.0, -2.0, -3.0, -4.0], np.float32), np.zeros(4, np.float32)],
    )


def test_the_teacher_judges_sampled_tokens_against_the_policy_that_the_ratio_is_of(tmp_path: Path) -> None:
    save_groups(tmp_path / "groups", [taught_group()])
    group = load_groups(tmp_path / "groups")[3]
    for form, expected in (("decoupled", [0.0, -1.0, -2.0, -3.0]), ("bypass", [-0.5, -1.75, -2.5, -3.75])):
        config = AlgorithmConfig(advantage="none", distillation_coefficient=0.5, correction_form=form)
        [[first, _]], _ = build_batches([group], config, FixedLogprobs(), 1)  # type: ignore[arg-type]
        np.testing.assert_allclose(first.extras["advantages"][first.loss_mask], 0.5 * np.array(expected), atol=1e-6)
        assert not first.extras["advantages"][~first.loss_mask].any()
    own = AlgorithmConfig(advantage="dr_grpo", distillation_coefficient=1.0)
    [[_, second]], metrics = build_batches([group], own, FixedLogprobs(), 1)  # type: ignore[arg-type]
    np.testing.assert_allclose(second.extras["advantages"][second.loss_mask], -0.5 + 1.0, atol=1e-6)
    assert metrics["distillation/kl"].value == pytest.approx((-8 * 1.0 + 10.0) / 8)


def test_by_default_a_policy_that_equals_its_teacher_stays_where_it_is(config: Path, words: list[str]) -> None:
    checked = check_run(load_config(config, GrpoConfig, words))
    group = replace(taught_group(), teacher_logprobs=[np.full(4, -1.0, np.float32)] * 2)
    algorithm, steps = checked.config.algorithm, checked.config.steps_per_update
    [[*sequences]], metrics = build_batches([group], algorithm, FixedLogprobs(), 1, single_step=steps == 1)  # type: ignore[arg-type]
    assert not any(sequence.extras["advantages"].any() for sequence in sequences), "the rollout's numbers are others"
    assert metrics["distillation/kl"].value == 0


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--algorithm.distillation_coefficient=1"], "set teacher.path"),
        (["--teacher.path=/nowhere"], "has no effect while algorithm.distillation_coefficient is 0"),
        (["--teacher.num_replicas=2"], "no effect without teacher.path"),
        (["--algorithm.distillation_coefficient=1", "--teacher.path=/nowhere"], "/nowhere"),
        (
            ["--algorithm.distillation_coefficient=1", "--teacher.path={taught}", "--teacher.backend=nothing"],
            "'nothing' is not installed",
        ),
        (["--reward.name="], "needs something that judges"),
    ],
)
def test_half_a_teacher_is_refused(config: Path, taught: Path, changes: list[str], says: str) -> None:
    with pytest.raises(Exception, match=says):
        check_run(load_config(config, GrpoConfig, [each.format(taught=taught) for each in changes]))


def test_a_teacher_with_another_tokenizer_is_refused(
    config: Path, taught: Path, tmp_path: Path, words: list[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in taught.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    held = json.loads((other / "tokenizer.json").read_text())
    vocabulary = held["model"]["vocab"]
    one, two = list(vocabulary)[20:22]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(held))
    with pytest.raises(ConfigError, match=r"another tokenizer than .* has id \d+ here and id \d+ there"):
        check_run(load_config(config, GrpoConfig, [*words, f"--teacher.path={other}"]))


def test_an_engine_that_does_not_score_is_no_teacher(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        @staticmethod
        async def create(config: RolloutEngineConfig) -> FakeRolloutEngine:
            return FakeRolloutEngine(lambda request, index: [1])

    monkeypatch.setattr(teacher_role, "load_backend", lambda kind, name: Backend)
    role = TeacherRole(config=load_config(config, GrpoConfig, ["--teacher.backend=fake"]), num_threads=1)
    with pytest.raises(ConfigError, match="'fake' does not score"):
        asyncio.run(role.start())


@pytest.mark.parametrize("images", [False, True])
def test_a_teacher_that_would_not_see_the_images_is_refused(config: Path, words: list[str], images: bool) -> None:
    named = load_config(config, GrpoConfig, [*words, "--teacher.backend=torch"])
    role = TeacherRole(config=named, num_threads=1, images=images)

    async def start() -> None:
        await role.start()
        await role.close()

    with pytest.raises(ConfigError, match="scores text alone") if images else nullcontext():
        asyncio.run(start())


def test_without_rewards_the_teacher_alone_is_learned_from(config: Path, words: list[str]) -> None:
    preflight = check_run(load_config(config, GrpoConfig, [*words, "--reward.name=", "--rollout.samples_per_prompt=1"]))
    assert not preflight.config.reward.is_set


# ── where it goes ────────────────────────────────────────────────────────────────────────────────────────────────────


def on_gpus(config: Path, words: list[str], *more: str) -> GrpoConfig:
    wide = ["--engine.num_ranks=4", "--rollout.num_engines=2", "--rollout.tensor_parallel=2"]
    devices = ["--engine.device=auto", "--rollout.device=auto"]
    loaded = load_config(config, GrpoConfig, [*words, *wide, *devices, "--teacher.tensor_parallel=2", *more])
    check_settings(resolve(loaded))
    return loaded


def placed(config: GrpoConfig, nodes: list[Node]) -> dict[str, set[tuple[str, int | None]]]:
    plan = place_run(config, ClusterView(nodes=tuple(nodes), reserves=True)).plan
    return {
        role: {(rank.node, rank.device) for rank in plan.ranks if rank.role == role}
        for role in ("trainer", "rollout", "teacher")
    }


def test_a_teacher_has_devices_of_its_own_or_those_of_the_engines(config: Path, words: list[str]) -> None:
    apart = placed(on_gpus(config, words), grid_nodes(2, 8))
    assert len(apart["teacher"]) == 2
    assert not apart["teacher"] & (apart["rollout"] | apart["trainer"])
    together = placed(on_gpus(config, words, "--teacher.colocate=true", "--teacher.num_replicas=2"), grid_nodes(1, 8))
    assert together["teacher"] == together["rollout"]
    assert not together["teacher"] & together["trainer"]


def test_a_teacher_that_shares_nothing_is_not_colocated(config: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="which share nothing"):
        placed(on_gpus(config, words, "--teacher.colocate=true", "--teacher.device=cpu"), grid_nodes(1, 8))


def test_a_rehearsal_has_a_small_teacher_of_other_weights(config: Path, words: list[str], tmp_path: Path) -> None:
    rehearsal = shrink_run(load_config(config, GrpoConfig, [*words, "--teacher.num_replicas=4"]), tmp_path / "model")
    preflight = rehearsal.prepare()
    assert preflight.config.teacher.num_replicas == 2
    teacher, policy = Path(preflight.config.teacher.path), preflight.model.path
    assert (teacher / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes()
    assert (teacher / "model.safetensors").read_bytes() != (policy / "model.safetensors").read_bytes()
