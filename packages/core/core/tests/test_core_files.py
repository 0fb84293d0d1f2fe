"""Files and folders are whole or absent, and on the disk before they have their name."""

import errno
import os

import pytest

from offbeat_core import (
    RunFolderError,
    atomic_folder,
    atomic_write,
    publish_folder,
    recover_folder,
    remove_leftovers,
    stage_folder,
)
from offbeat_testing import DiskRecord


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
    path = tmp_path / "folder"
    with atomic_folder(path) as folder:
        (folder / "weights").write_text("old")
    with DiskRecord(tmp_path) as disk:
        with atomic_folder(path) as folder:
            (folder / "deep" / "model").mkdir(parents=True)
            (folder / "deep" / "model" / "weights").write_text("new")
        *_, named, removed = disk.steps
        assert (named.target, removed.target) == ("folder", "")
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
    with pytest.raises(RunFolderError, match=r"the disk or its file system fails \(Input/output error\)"):
        write("new")
    assert [each.name for each in tmp_path.iterdir()] == [kind]
    assert (path.read_text() if kind == "file" else path.joinpath("old").read_text()) == "old"


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(RunFolderError, match="no space left"), atomic_folder(tmp_path / "folder"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_there", [False, True], ids=["a new name", "a folder that is there"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_folder_written_in_parts_has_its_name_only_once_all_of_it_is_on_the_disk(tmp_path, replaces, is_there):
    place = tmp_path / "step-1"
    if is_there:
        place.mkdir()
        (place / "old").touch()
    with DiskRecord(tmp_path) as disk:
        staged = stage_folder(place)
        for name in ("adapter/weights", "model", "tokenizer", "trainer/engine.json"):
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_text(name)
        publish_folder(staged, place, replaces=replaces)
        assert disk.unsynced() == []
        assert not [step for step in disk.steps if step.unsynced]
        assert not [step for step in disk.steps if not step.target and step.unsynced_beside], "the old one goes last"
    kept = ["old"] if is_there and not replaces else []
    assert sorted(each.name for each in place.iterdir()) == sorted([*kept, "adapter", "model", "tokenizer", "trainer"])
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]
    if kept:
        come = [os.path.basename(step.target) for step in disk.steps]
        assert sorted(come[:2]) == ["model", "tokenizer"], "the state of training comes last"
        assert sorted(come[2:]) == ["adapter", "trainer"]


def test_folders_are_put_back_and_replaced(tmp_path):
    place = tmp_path / "step-1"
    staged = stage_folder(place)
    (staged / "new").touch()
    place.mkdir()
    (place / "theirs").touch()
    publish_folder(staged, place, replaces=False)
    assert {each.name for each in place.iterdir()} == {"new", "theirs"}
    staged = stage_folder(place)
    publish_folder(staged, place, replaces=True)
    assert not list(place.iterdir())
    place.rename(tmp_path / ".old-01234567-step-1")  # killed between two renames
    recover_folder(place)
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]


def test_what_a_killed_process_has_left_is_cleared_away_and_other_folders_stay(tmp_path):
    place = tmp_path / "step-1"
    left, others = tmp_path / ".tmp-01234567-step-1", [tmp_path / ".tmp-01234567-my-step-1", tmp_path / "step-10"]
    for each in (left, *others):
        (each / "file").parent.mkdir()
        (each / "file").touch()
    staged = stage_folder(place)
    assert not left.exists()
    assert all((each / "file").exists() for each in others)
    assert staged.parent == tmp_path
    assert not list(staged.iterdir())
    assert not place.exists()


def test_what_a_kill_has_left_is_cleared_and_what_it_had_put_aside_comes_back(tmp_path):
    (tmp_path / ".tmp-1234-file").write_text("half")
    torn, aside = tmp_path / ".tmp-1234-first", tmp_path / ".old-1234-second"
    for folder in (torn, aside, tmp_path / ".old-5678-third", tmp_path / "third"):  # the third had got its name
        folder.mkdir()
        (folder / "text").write_text(folder.name)
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "third"]
    assert (tmp_path / "second" / "text").read_text() == ".old-1234-second"
    assert (tmp_path / "third" / "text").read_text() == "third"


def fail_after(num_written):
    assert num_written == 4
    raise KeyError


def fill_the_disk():
    with open("/dev/full", "w") as full:  # the system's own device without room: every write fails with ENOSPC
        full.write("x")
