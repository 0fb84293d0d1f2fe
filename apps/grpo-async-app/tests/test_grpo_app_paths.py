"""Commands that are called in another folder than that of their file."""

import re
import shutil
from pathlib import Path

import pytest

from offbeat_run import read_metrics
from offbeat_testing import CommandLine

REWARD = "def score(prompt, completion, answer):\n    return 0.5\n"


@pytest.fixture
def file(config: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with relative paths to all that lies beside it; the working folder is another one."""
    folder, elsewhere = tmp_path / "recipe", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(model, folder / "model")
    rows = config.with_name("sums.jsonl")
    shutil.copy(rows, folder)
    (folder / "mine.py").write_text(REWARD)
    text = config.read_text().replace(str(model), "model").replace(str(rows), "sums.jsonl")
    text = re.sub(r'(\[reward\]\nname = )"[^"]+"', r'\1"mine.py:score"', text)
    (folder / "my.toml").write_text(text)
    monkeypatch.chdir(elsewhere)
    return folder / "my.toml"


def test_a_file_with_relative_paths_is_planned_from_any_folder(
    command: CommandLine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "all that the configuration needs is here" in command("doctor", "../recipe/my.toml").out
    plan = command("plan", "../recipe/my.toml")
    assert plan.code == 0, plan.err
    assert "training prompts from sums.jsonl" in plan.out
    assert "mine.py:score: called as function(prompt, completion)" in plan.out

    elsewhere = Path.cwd()
    monkeypatch.chdir(file.parent)
    shutil.move(file, elsewhere)
    said = command.refused("plan", "../elsewhere/my.toml")
    for key, name in (("model.path", "model"), ("data.path", "sums.jsonl"), ("reward.name", "mine.py")):
        assert re.search(rf"my\.toml:\d+: {key}: {name} is not in {elsewhere}, the folder of the file", said)
    typed = ["--model.path=model", "--data.path=sums.jsonl", "--reward.name=mine.py:score"]
    assert command("plan", "../elsewhere/my.toml", *typed).code == 0


@pytest.mark.nightly
@pytest.mark.timeout(300)  # two runs, each with processes that import torch
def test_a_run_of_relative_paths_is_resumed_from_any_folder_and_calls_things_as_they_were_written(
    command: CommandLine, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    done = command("train", "../recipe/my.toml", "--out", run, "--engine.max_updates=1", "--eval.every_updates=0")
    assert done.code == 0, done.err
    monkeypatch.chdir("/")
    resumed = command("resume", run, "--engine.max_updates=2")
    assert resumed.code == 0, resumed.err
    names = {name for line in read_metrics(run / "metrics.jsonl") for name in line.values}
    assert "reward/mine.py:score" in names
    assert not [name for name in names if str(file.parent) in name]
    written = (run / "report.html").read_text()
    assert written.count("mine.py:score") > written.count("/./mine.py:score") == 1  # in the configuration
