"""A checkpoint is whole or not there; the last and the best ones stay."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_run import Checkpoints, atomic_folder, atomic_write
from offbeat_testing import DiskRecord
from offbeat_types import RunFolderError


def checkpoints(tmp_path, *steps, **scores):
    held = Checkpoints(tmp_path)
    for step in steps:
        with held.write(step, score=scores.get(f"s{step}")) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "weights").write_text(f"weights {step}")
    return held


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write("old")
    with pytest.raises(KeyError), atomic_write(path) as file:
        fail_after(file.write("half"))
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_appears_whole_or_not_at_all_and_replaces_an_older_one(tmp_path):
    path = tmp_path / "folder"
    for text in ("old", "new"):
        with atomic_folder(path) as folder:
            (folder / text).write_text(text)
    with pytest.raises(KeyError), atomic_folder(path) as folder:
        fail_after((folder / "half").write_text("half"))
    assert [each.name for each in path.iterdir()] == ["new"]
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_a_file_has_its_name_once_it_is_on_the_disk(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with DiskRecord(tmp_path) as disk:
        with atomic_write(path) as file:
            file.write("new")
        (named,) = disk.steps
        assert (named.target, named.unsynced) == ("file", ())
        assert disk.unsynced() == []


def test_a_folder_has_its_name_once_all_of_it_is_on_the_disk_and_the_older_one_goes_after_that(tmp_path):
    held = checkpoints(tmp_path, 1)
    with DiskRecord(tmp_path) as disk:
        with held.write(1) as folder:
            (folder / "deep" / "model").mkdir(parents=True)
            (folder / "deep" / "model" / "weights").write_text("new")
        *_, named, removed = disk.steps
        assert (named.target, removed.target) == ("step-000001", "")
        assert not [step for step in disk.steps if step.unsynced]
        assert removed.unsynced_beside == ()
        assert disk.unsynced() == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_the_disk_refuses_gets_no_name(tmp_path, monkeypatch, kind):
    path = tmp_path / kind

    def write(text):
        if kind == "file":
            with atomic_write(path) as file:
                file.write(text)
        else:
            with atomic_folder(path) as folder:
                (folder / "old").write_text(text)

    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    write("old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        write("new")
    assert [each.name for each in tmp_path.iterdir()] == [kind]
    assert (path.read_text() if kind == "file" else path.joinpath("old").read_text()) == "old"


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(RunFolderError, match="no space left"), atomic_folder(tmp_path / "folder"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


def fail_after(num_written):
    assert num_written == 4
    raise KeyError


def fill_the_disk():
    with open("/dev/full", "w") as full:  # the system's own device without room: every write fails with ENOSPC
        full.write("x")


def test_the_latest_and_the_best_are_found(tmp_path):
    held = checkpoints(tmp_path, 10, 2, 30, s10=0.5, s2=0.9)
    held.set_score(30, 0.9)
    assert [each.step for each in held.all()] == [2, 10, 30]
    latest, best = held.latest(), held.best()
    assert latest is not None
    assert best is not None
    assert (latest.step, latest.score, best.step) == (30, 0.9, 2)
    assert (latest.path / "model" / "weights").read_text() == "weights 30"


def test_without_any_there_is_no_latest_and_no_best(tmp_path):
    assert Checkpoints(tmp_path).latest() is None
    assert Checkpoints(tmp_path / "none").best() is None


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "trainer/optimizer.pt", "loop/state.json", "loop/buffer.safetensors", "checkpoint.json"],
)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_resume_says_which_checkpoint_it_takes_and_why_not_a_newer_one(tmp_path, name, damage):
    held = Checkpoints(tmp_path)
    assert held.describe_resume() == ["no whole checkpoint: begins anew"]
    for step in (2, 4):
        with held.write(step) as folder:
            for each in ("model.safetensors", "trainer/optimizer.pt", "loop/state.json", "loop/buffer.safetensors"):
                (folder / each).parent.mkdir(exist_ok=True)
                (folder / each).write_text("whole")
    assert held.describe_resume() == [f"resumes from update 4 ({tmp_path / 'step-000004'})"]
    file = tmp_path / "step-000004" / name
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:-2])
    first, second = held.describe_resume()
    assert first.startswith(f"checkpoint step-000004 is damaged ({name} ")
    assert second == f"resumes from update 2 ({tmp_path / 'step-000002'})"


def test_a_process_killed_while_writing_leaves_the_checkpoint_before(tmp_path):
    checkpoints(tmp_path, 1)
    code = (
        "import sys, time; from pathlib import Path; from offbeat_run import Checkpoints\n"
        "with Checkpoints(Path(sys.argv[1])).write(2) as folder:\n"
        "    (folder / 'weights').write_text('half'); print('writing', flush=True); time.sleep(60)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait(timeout=30)
    writer.stdout.close()
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    assert latest.step == 1


def test_what_a_kill_has_left_of_a_removal_is_removed_the_next_time(tmp_path):
    held = checkpoints(tmp_path, 1, 2)
    (tmp_path / "step-000001" / "checkpoint.json").unlink()  # the first that is removed
    held.prune(keep=5)
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000002"]


# The disk decides how long an example takes, so none has a deadline.
@settings(max_examples=30)
@given(
    steps=st.sets(st.integers(0, 99), max_size=6),
    keep=st.integers(0, 4),
    data=st.data(),
)
def test_pruning_keeps_the_last_and_the_best_and_never_removes_the_only_one(tmp_path_factory, steps, keep, data):
    scores = {f"s{step}": data.draw(st.floats(0, 1)) for step in steps}
    held = checkpoints(tmp_path_factory.mktemp("run"), *steps, **scores)
    best, latest = held.best(), held.latest()
    removed = held.prune(keep)
    left = [each.step for each in held.all()]
    assert {*left, *(each.step for each in removed)} == steps
    assert left[-max(keep, 1) :] == sorted(steps)[-max(keep, 1) :]
    assert len(left) <= max(keep, 1) + 1
    if latest is not None and best is not None:
        assert latest.step in left
        assert best.step in left
