"""Bytes that have changed in a checkpoint are seen by every reader, and an older checkpoint is read instead."""

from pathlib import Path

import pytest
from sft_runs import values_of

from offbeat_run import RunFolder
from offbeat_testing import DAMAGES, CommandLine
from sft_app._train import find_start

NUM_UPDATES = 8


def test_whichever_byte_of_a_checkpoint_has_changed_a_resume_goes_on_from_the_one_before(
    command: CommandLine, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First what a resume reads, for every file and every damage; then one resume to its end."""
    path = tmp_path / "run"
    assert command("train", config, "--out", path, "--checkpoint.every=7", "--engine.lora_rank=2").code == 0
    newest = path / "checkpoints" / "step-000008"
    files = sorted(file for file in newest.rglob("*") if file.is_file() and file.name != "README.md")
    names = {str(file.relative_to(newest)) for file in files}
    assert {
        "checkpoint.json",
        "loop.json",
        "model.safetensors",
        "tokenizer.json",
        "adapter/adapter_model.safetensors",
        "trainer/optimizer-00001-of-00001.safetensors",
    } <= names
    with RunFolder.open(path) as run:
        for file in files:
            name, whole = file.relative_to(newest), file.read_bytes()
            for kind, damage in DAMAGES.items():
                file.write_bytes(damage(whole))
                assert find_start(run).updates == 7, (name, kind)
                assert capsys.readouterr().out.startswith(f"checkpoint step-000008 is damaged ({name} "), kind
                newest.with_name("damaged-step-000008").rename(newest)
            file.write_bytes(whole)
        assert find_start(run).updates == 8
    moments = newest / "trainer" / "optimizer-00001-of-00001.safetensors"
    moments.write_bytes(DAMAGES["a page of zeros"](moments.read_bytes()))
    ended = command("resume", path)
    assert ended.code == 0, ended.err
    assert "is damaged (trainer/optimizer-00001-of-00001.safetensors has the digest " in ended.out
    assert f"resumes from update 7 ({newest.with_name('step-000007')})" in ended.out
    assert list(values_of(path, "train/loss")) == list(range(1, NUM_UPDATES + 1))


def test_an_evaluation_passes_over_a_damaged_checkpoint_and_a_push_refuses_one_that_is_named(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    assert command("train", config, "--out", path, "--checkpoint.every=7").code == 0
    checkpoints = path / "checkpoints"
    (checkpoints / "scores.json").write_text('{"7": -2.0, "8": -1.0}')
    weights = checkpoints / "step-000008" / "model.safetensors"
    weights.write_bytes(DAMAGES["a byte in the middle"](weights.read_bytes()))
    ended = command("eval", path)
    assert ended.code == 0, ended.err
    assert "checkpoint step-000008 is damaged (model.safetensors has the digest " in ended.out
    assert "checkpoint of update 7: loss" in ended.out
    ended = command("push", path, "--step", "8", "--push-to", tmp_path / "pushed")
    assert (ended.code, "step-000008 is damaged: model.safetensors" in ended.err) == (2, True), ended.err
    assert not (tmp_path / "pushed").exists()


@pytest.mark.parametrize("state", ["[]", "{}", '{"updates": "x", "batch_size": 8}', '{"updates": null}', '"\udc80"'])
def test_a_state_that_says_nothing_is_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        for step, text in ((1, '{"updates": 1, "batch_size": 8}'), (2, state)):
            with run.checkpoints.write(step) as folder:
                (folder / "loop.json").write_text(text, errors="surrogateescape")
        start = find_start(run)
    assert (start.updates, start.progress.position) == (1, 8)
    assert capsys.readouterr().out.startswith("checkpoint step-000002 is damaged (loop.json cannot be read: ")
