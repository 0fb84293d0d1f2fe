"""A resumed run takes over its checkpoint, and samples anew what cannot be trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_grpo_app_parts import group

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.data import mark_of
from grpo_async_app._preflight.preflight import Preflight, check_run
from grpo_async_app._roles.groups import SampledGroup, save_groups
from grpo_async_app._run.backend import LOOP_FOLDER
from grpo_async_app._run.session import Session
from offbeat_async_policy import AsyncPolicy, Submit
from offbeat_core import load_config
from offbeat_run import RunFolder


def resumed(path: Path, preflight: Preflight, policy: AsyncPolicy, finished: list[SampledGroup]) -> Session:
    """Continue under other settings from a checkpoint of a policy with these finished groups."""
    with RunFolder.create(path, required_bytes=0) as run:
        with run.checkpoints.write(policy.version) as folder:
            save_groups(folder / LOOP_FOLDER, finished)
            state = {"policy": policy.state(), "prompts": mark_of(preflight.prompts.train)}
            (folder / LOOP_FOLDER / "state.json").write_text(json.dumps(state))
        return Session.from_latest(preflight, run)


@pytest.mark.parametrize(
    ("words", "lack"),
    [
        (["--algorithm.advantage=grpo"], ""),
        (["--algorithm.advantage=remax"], "no greedy reward, which algorithm.advantage = remax subtracts"),
        (["--algorithm.distillation_coefficient=1", "--teacher.path={model}"], "no log-probabilities of the teacher"),
        (
            ["--algorithm.advantage=gdpo", "--reward.name=", "--reward.weights={{exact_match=1.0, number_match=1.0}}"],
            "no reward number_match, which algorithm.advantage = gdpo looks at by itself",
        ),
    ],
)
def test_a_resume_samples_groups_anew_that_lack_what_its_objective_reads(
    config: Path, model: Path, tmp_path: Path, words: list[str], lack: str
) -> None:
    """The groups are of a run with grpo, ended between two updates with two groups finished and others in flight."""
    preflight = check_run(load_config(config, GrpoConfig, [word.format(model=model) for word in words]))
    policy = AsyncPolicy(preflight.config.async_, preflight.num_groups)
    submitted = [action.group_id for action in policy.actions() if isinstance(action, Submit)]
    finished = [group(number, [3, 2], [1.0, 0.0]) for number in submitted[:2]]
    for each in finished:
        policy.group_finished(each.group_id, 0)
    session = resumed(tmp_path / "run", preflight, policy, finished)
    anew = submitted if lack else submitted[2:]
    after = session.policy.state()
    assert after["waiting"] == anew
    assert [group_id for group_id, _ in after["finished"]] == list(session.groups) == submitted[: -len(anew)]
    assert after["statistics"]["filtered"] == 0
    said = f"2 finished groups of the checkpoint are sampled again: they have {lack}"
    assert session.notices == ((said,) if lack else ())
    session.policy.actions()
    session.policy.sync_finished()
    again = [action.group_id for action in session.policy.actions() if isinstance(action, Submit)]
    assert again[: len(anew)] == anew, "before all new groups"


@pytest.mark.parametrize(("threshold", "form"), [(0.0, "decoupled"), (1.0, "bypass")])
def test_a_resume_without_staleness_trains_no_group_of_older_weights(
    config: Path, tmp_path: Path, threshold: float, form: str
) -> None:
    """The correction is chosen by the settings alone, so groups of a run with staleness must not need one."""
    words = (f"--async.staleness_threshold={threshold}", "--async.partial_rollout=false")
    preflight = check_run(load_config(config, GrpoConfig, words))
    chosen = preflight.config.algorithm
    assert (chosen.correction, chosen.correction_form) == ("none", form), "only bypass clips around the sampler"
    policy = AsyncPolicy(replace(preflight.config.async_, staleness_threshold=1.0), preflight.num_groups)
    num_trained = policy.config.groups_per_update
    started = [action.group_id for action in policy.actions() if isinstance(action, Submit)]
    for number in started:
        policy.group_finished(number, 0)
    policy.actions()
    policy.update_finished()
    older = started[num_trained:]
    session = resumed(tmp_path / "run", preflight, policy, [group(number, [3, 2], [1.0, 0.0]) for number in older])
    kept = older if threshold else []
    assert list(session.groups) == [number for number, _ in session.policy.state()["finished"]] == kept
    assert session.policy.state()["waiting"] == [number for number in older if number not in kept]
    said = f"{len(older)} finished groups of the checkpoint are sampled again: they are older than "
    assert session.notices == (() if kept else (f"{said}async.staleness_threshold = 0 admits",))
