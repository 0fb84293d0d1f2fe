"""Which files are read: each once, none of another program, and never something that does not end."""

import os
from pathlib import Path

import pytest

from offbeat_hanglint._reading.files import MAX_FILE_BYTES, find_files, read_source


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("a = 1\n")


def paths(*given: Path, root: Path | None = None, exclude: tuple[str, ...] = ()) -> list[str]:
    return [each.path for each in find_files(given, root, exclude)[0]]


def test_files_are_named_relative_to_the_root_and_come_in_order(tmp_path: Path) -> None:
    write(tmp_path, "b/c.py", "a.py", "b/a.txt", "b/d.pyi", "script")
    assert paths(tmp_path) == ["a.py", "b/c.py"]
    assert paths(tmp_path / "b", root=tmp_path) == ["b/c.py"]
    assert paths(tmp_path / "b") == ["c.py"]
    assert paths(tmp_path / "script", root=tmp_path) == ["script"], "a file that is named is read"
    assert [each.below for each in find_files([tmp_path / "b"], tmp_path)[0]] == ["c.py"]


def test_a_file_is_read_once_however_often_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, "b/c.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "b" / "c.py")
    assert len(paths(tmp_path, tmp_path / "b", tmp_path / "b" / "c.py", root=tmp_path)) == 1


def test_what_is_no_part_of_the_program_is_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        ".venv/a.py",
        "x/__pycache__/a.py",
        "node_modules/a.py",
        "third_party/x/a.py",
        "x/build/a.py",
        "x/a.py",
    )
    assert paths(tmp_path, exclude=("third_party", "build/")) == ["x/a.py"]
    assert paths(tmp_path, exclude=("third_party/*", "*/build/*.py")) == ["x/a.py"]
    assert paths(tmp_path / "third_party" / "x" / "a.py", root=tmp_path, exclude=("third_party",)), "unless it is named"


def test_links_in_a_circle_pipes_and_broken_links_end(tmp_path: Path) -> None:
    write(tmp_path, "b/c.py")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "self.py").symlink_to("self.py")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    assert paths(tmp_path) == ["b/c.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_may_not_be_entered_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "closed/b.py")
    (tmp_path / "closed").chmod(0)
    files, unreadable = find_files([tmp_path])
    (tmp_path / "closed").chmod(0o700)
    assert [each.path for each in files] == ["a.py"]
    assert unreadable == [("closed", "Permission denied")]


def test_a_file_too_large_for_its_tree_to_fit_into_memory_is_not_opened(tmp_path: Path) -> None:
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    (source,) = find_files([tmp_path])[0]
    with pytest.raises(OSError, match="over 8000000"):
        read_source(source)
