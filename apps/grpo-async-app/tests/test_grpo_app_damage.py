"""Bytes that have changed in a checkpoint are seen by every reader, and an older checkpoint is read instead."""

import json
from pathlib import Path

import pytest
from grpo_runs import Main, run_to_its_end, values_of

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.preflight import Preflight, check_run
from grpo_async_app._run.session import Session
from offbeat_core import RunFolderError, load_config
from offbeat_run import RunFolder
from offbeat_testing import DAMAGES, CommandLine, RunningCommand

NUM_UPDATES = 5


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def trained(forked_main: Main, config: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of updates 4 and 5, and none that is kept for being the best."""
    words = ["--checkpoint.every=2", "--eval.every_updates=0"]
    run_to_its_end(forked_main, "train", config, "--out", tmp_path / "run", *words)
    return tmp_path / "run"


def resumed(preflight: Preflight, run: RunFolder) -> tuple[int, list[str]]:
    """Return the update that a resume begins with, and its notices."""
    notices: list[str] = []
    return Session.from_latest(preflight, run, notices.append).step, notices


def test_whichever_byte_of_a_checkpoint_has_changed_a_resume_goes_on_from_the_one_before(
    trained: Path, forked_main: Main
) -> None:
    """First what a resume reads, for every file and every damage; then one resume to its end."""
    preflight = check_run(load_config(trained / "config.toml", GrpoConfig, ()))
    newest = trained / "checkpoints" / "step-000005"
    files = sorted(file for file in newest.rglob("*") if file.is_file() and file.name != "README.md")
    names = {str(file.relative_to(newest)) for file in files}
    assert {
        "checkpoint.json",
        "config.json",
        "model.safetensors",
        "loop/state.json",
        "loop/buffer.json",
        "loop/buffer.safetensors",
        "trainer/engine.json",
        "trainer/optimizer-00001-of-00001.safetensors",
    } <= names
    with RunFolder.open(trained) as run:
        for file in files:
            name, whole = file.relative_to(newest), file.read_bytes()
            for kind, damage in DAMAGES.items():
                file.write_bytes(damage(whole))
                step, notices = resumed(preflight, run)
                assert step == 4, (name, kind)
                assert notices[0].startswith(f"checkpoint step-000005 is damaged ({name} "), (kind, notices)
                newest.with_name("damaged-step-000005").rename(newest)
            file.write_bytes(whole)
        assert resumed(preflight, run)[0] == 5
    weights = newest / "model.safetensors"
    weights.write_bytes(DAMAGES["a byte in the middle"](weights.read_bytes()))
    output = in_one_line(run_to_its_end(forked_main, "resume", trained))
    assert "checkpoint step-000005 is damaged (model.safetensors has the digest " in output
    assert "resumes from update 4" in output
    assert list(values_of(trained, "train/reward")) == list(range(1, NUM_UPDATES + 1))
    assert sorted(each.name for each in newest.parent.glob("*step-*")) == ["step-000004", "step-000005"]


def test_a_checkpoint_that_is_named_is_refused_when_it_is_damaged(
    trained: Path, command: CommandLine, forked_main: Main, tmp_path: Path
) -> None:
    newest = trained / "checkpoints" / "step-000005"
    weights = newest / "model.safetensors"
    weights.write_bytes(DAMAGES["a byte at the end"](weights.read_bytes()))
    said = f"{newest} is damaged: model.safetensors has the digest "
    for words in (
        ["eval", trained, "--step", "5"],
        ["eval", newest, "--config", trained / "config.toml"],
        ["push", trained, "--step", "5", "--push-to", tmp_path / "pushed"],
        ["train", trained / "config.toml", "--out", tmp_path / "next", "--model.path", newest],
    ):
        ended = command(*words)
        assert (ended.code, said in in_one_line(ended.err)) == (2, True), (words, ended.err)
    assert not (tmp_path / "pushed").exists()
    assert not (tmp_path / "next").exists()
    (trained / "checkpoints" / "scores.json").write_text(json.dumps({4: 0.1, 5: 0.9}))
    ended = command("push", trained, "--push-to", tmp_path / "pushed")
    assert ended.code == 0, ended.err
    assert "checkpoint step-000005 is damaged (model.safetensors has the digest " in ended.out
    assert "pushed the checkpoint of update 4" in ended.out
    state = trained / "checkpoints" / "step-000004" / "loop" / "state.json"
    state.write_bytes(DAMAGES["a page of zeros"](state.read_bytes()))
    with RunningCommand(forked_main, "resume", trained) as process:
        assert process.wait() == 2, process.output
        output = in_one_line(process.output)
    assert "is damaged: step-000005 (model.safetensors has the digest " in output
    assert "step-000004 (loop/state.json has the digest " in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("state.json", "\0" * 200, "JSONDecodeError"),
        ("state.json", '{"prompts": null}', "KeyError: 'policy'"),
        ("state.json", '{"policy": {"version": 3}}', "RunFolderError"),
        ("buffer.json", '[{"group_id": 3}]', "KeyError: 'trajectories'"),
        ("buffer.json", "5", "TypeError"),
        ("buffer.safetensors", "\xff" * 200, "SafetensorError"),
    ],
)
def test_a_file_that_cannot_be_read_damages_a_checkpoint_of_an_older_version(
    config: Path, tmp_path: Path, name: str, text: str, why: str
) -> None:
    """It has no digests, and its JSON may be whole."""
    preflight = check_run(load_config(config, GrpoConfig, ()))
    with RunFolder.create(tmp_path / "run") as run:
        session = Session.from_start(preflight, run)
        with run.checkpoints.write(1) as folder:
            loop = folder / "loop"
            loop.mkdir()
            (loop / "state.json").write_text(json.dumps({"policy": session.policy.state()}))
            (loop / "buffer.json").write_text("[]")
            (loop / "buffer.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
            (loop / name).write_text(text)
        with pytest.raises(RunFolderError, match=f"step-000001 \\(loop/{name} cannot be read: {why}"):
            Session.from_latest(preflight, run, print)
