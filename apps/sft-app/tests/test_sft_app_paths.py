"""Commands that are called in another folder than that of their file."""

import shutil
import tomllib
from pathlib import Path

import pytest

from offbeat_testing import CommandLine


@pytest.fixture
def file(config: Path, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with relative paths to all that lies beside it; the working folder is another one."""
    folder, elsewhere = tmp_path / "recipe", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(model, folder / "model")
    shutil.copy(data, folder)
    (folder / "my.toml").write_text(config.read_text().replace(str(model), "model").replace(str(data), "chats.jsonl"))
    monkeypatch.chdir(elsewhere)
    return folder / "my.toml"


def test_a_file_with_relative_paths_serves_every_command_from_any_folder(
    command: CommandLine, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder, elsewhere = tmp_path / "run", file.parent, Path.cwd()
    assert "all that the configuration needs is here" in command("doctor", "../recipe/my.toml").out
    plan = command("plan", "../recipe/my.toml")
    assert plan.code == 0
    assert "rows from chats.jsonl" in plan.out
    assert command("train", "../recipe/my.toml", "--out", run, "--engine.max_updates=2").code == 0
    kept = tomllib.loads((run / "config.toml").read_text())
    assert [kept["model"]["path"], kept["data"]["path"]] == [f"{folder}/./model", f"{folder}/./chats.jsonl"]
    monkeypatch.chdir("/")
    resumed = command("resume", run, "--engine.max_updates=3")
    assert resumed.code == 0, resumed.err
    assert command("eval", run).code == 0

    monkeypatch.chdir(folder)
    shutil.move(file, elsewhere)
    said = command.refused("plan", "../elsewhere/my.toml")
    for name in ("model", "chats.jsonl"):
        assert f"{name} is not in {elsewhere}, the folder of the file" in said
        assert f"it lies in the working folder: write ../recipe/{name}" in said
    typed = ["--model.path=model", "--data.path=chats.jsonl"]
    assert command("plan", "../elsewhere/my.toml", *typed).code == 0


def test_a_copy_of_the_file_in_another_folder_is_refused_with_its_relative_paths(
    command: CommandLine, file: Path
) -> None:
    shape = ["--cluster=1x8", "--engine.device=cuda"]
    assert command("slurm", "../recipe/my.toml", *shape).code == 0  # it names the file itself
    keys = "../recipe/my.toml: model.path, data.path: a relative path is relative to the folder of the file"
    assert keys in command.refused("sky", "../recipe/my.toml", *shape, "--bucket=runs", "--accelerator=H100")
    said = command.refused("k8s", "../recipe/my.toml", *shape, "--image=a/b", "--model.path=model")
    assert "my.toml: data.path: a relative path" in said
    fit = ["--cluster=2x4", "--fit"]
    wide = file.read_text().replace("[engine]", "[engine]\nnum_ranks = 8").replace('device = "cpu"', 'device = "cuda"')
    file.write_text(wide)
    said = command.refused("plan", "../recipe/my.toml", *fit, "new.toml")
    assert "relative to its folder: write the new file there, as --fit ../recipe/new.toml" in said


def test_problems_have_their_line_and_a_missing_model_hides_no_faulty_rows(command: CommandLine, file: Path) -> None:
    lines = file.read_text().splitlines()
    number = lines.index("[model]") + 2
    file.write_text(file.read_text().replace('"model"', '"absent"'))
    rows = file.with_name("chats.jsonl")
    rows.write_text(rows.read_text() + "{broken\n")
    for name in ("plan", "train"):
        said = command.refused(name, "../recipe/my.toml", "--data.epochs=0", "--engine.max_updates=0")
        assert said.startswith("error: 3 problems\n")
        assert f"../recipe/my.toml:{number}: model.path: no such folder: {file.parent}/absent" in said
        assert "--data.epochs: the run would never end: set data.epochs" in said
        assert f"{rows}, line 25" in said
    doctor = command("doctor", "../recipe/my.toml").out
    assert f"../recipe/my.toml:{number}: model.path" in " ".join(doctor.split())


def test_a_first_file_leads_from_its_own_folder_to_what_was_typed(
    command: CommandLine, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    shutil.copytree(model, tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    assert command("init", "--model=own", f"--data={data.name}", "--out=configs/my.toml").code == 0
    text = (tmp_path / "configs" / "my.toml").read_text()
    assert 'path = "../own"' in text
    assert 'path = "../chats.jsonl"' in text
    monkeypatch.chdir("/")
    assert "model           qwen3" in command("plan", tmp_path / "configs" / "my.toml", "--data.eval_size=4").out
