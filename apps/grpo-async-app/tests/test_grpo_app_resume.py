"""A resumed run takes over its checkpoint, and samples anew what cannot be trained."""

import json
from pathlib import Path

import pytest
from test_grpo_app_parts import group

from grpo_async_app._config.preflight import check_run
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._config.validation_sets import mark_of
from grpo_async_app._roles.groups import save_groups
from grpo_async_app._run.backend import LOOP_FOLDER
from grpo_async_app._run.session import _Session
from offbeat_async_policy import AsyncPolicy, Submit
from offbeat_run import RunFolder, load_config


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
    with RunFolder.create(tmp_path / "run", required_bytes=0) as run:
        with run.checkpoints.write(0) as folder:
            save_groups(folder / LOOP_FOLDER, finished)
            state = {"policy": policy.state(), "prompts": mark_of(preflight.prompts.train)}
            (folder / LOOP_FOLDER / "state.json").write_text(json.dumps(state))
        session = _Session.from_latest(preflight, run)
    anew = submitted if lack else submitted[2:]
    after = session.policy.state()
    assert after["waiting"] == anew
    assert [group_id for group_id, _ in after["finished"]] == list(session.groups) == submitted[: -len(anew)]
    assert after["statistics"]["filtered"] == 0
    said = f"2 finished groups of the checkpoint are sampled anew: they have {lack}"
    assert session.notices == ((said,) if lack else ())
    session.policy.actions()
    session.policy.sync_finished()
    again = [action.group_id for action in session.policy.actions() if isinstance(action, Submit)]
    assert again[: len(anew)] == anew, "before all new groups"
