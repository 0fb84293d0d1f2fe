"""A record of the disk knows what a power failure would take."""

import os
import shutil

from offbeat_testing import DiskRecord, DiskStep


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_bytes_need_a_sync_after_the_last_of_them_and_a_name_one_of_its_folder(tmp_path):
    (tmp_path / "old").write_text("was there")
    with DiskRecord(tmp_path) as disk:
        assert disk.unsynced() == []
        (tmp_path / "file").write_text("one")
        sync(tmp_path)
        assert disk.unsynced() == ["file"], "its bytes"
        with (tmp_path / "file").open("a") as file:
            file.write("two")
            os.fdatasync(file)
            file.flush()
            assert disk.unsynced() == ["file"], "what was not flushed is not synced"
            os.fdatasync(file)
            assert disk.unsynced() == []
        (tmp_path / "folder" / "inner").mkdir(parents=True)
        assert disk.unsynced() == ["folder", "folder/inner"]
        sync(tmp_path)
        assert disk.unsynced() == ["folder/inner"]
        (tmp_path / "file").unlink()
        (tmp_path / "file").write_text("onetwo")
        assert disk.unsynced() == ["file", "folder/inner"], "another file of the same name and bytes"


def test_a_rename_and_a_removal_say_what_was_not_on_the_disk_before_them(tmp_path):
    fsync = os.fsync
    with DiskRecord(tmp_path) as disk:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text(name)
        sync(tmp_path / "b")
        sync(tmp_path / "b" / "file")
        os.replace(tmp_path / "b", tmp_path / "c")
        (tmp_path / "a" / "file").rename(tmp_path / "file")
        shutil.rmtree(tmp_path / "a")
        shutil.rmtree(tmp_path / "none", ignore_errors=True)
        sync(tmp_path)
    assert disk.steps == [
        DiskStep("b", "c", (), ("a", "a/file")),
        DiskStep("a/file", "file", ("a/file",), ("a", "c")),
        DiskStep("a", "", (), ("c", "file")),
    ]
    assert disk.unsynced() == ["file"]
    assert os.fsync is fsync
