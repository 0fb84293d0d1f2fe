"""The digest of a file is xxh3 of its bytes, made while it is written or by reading it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from offbeat_core import describe_damage, digest_file, digest_of, drop_model_files, sync_path, write_digest
from offbeat_testing import DiskRecord


@given(data=st.binary(max_size=100), repeats=st.sampled_from([1, 10_000]))
def test_a_digest_is_that_of_all_bytes(tmp_path_factory, data, repeats):
    path = tmp_path_factory.mktemp("file") / "file"
    path.write_bytes(data * repeats)
    assert digest_file(path) == digest_of(path) == xxh3_64_hexdigest(data * repeats)


def test_the_digest_of_what_was_written_is_taken_before_that_of_what_is_there(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"written")
    write_digest(path, digest_file(path))
    assert describe_damage(path, digest_of(path)) == ""
    path.write_bytes(b"changed")
    found, written = xxh3_64_hexdigest(b"changed"), xxh3_64_hexdigest(b"written")
    assert describe_damage(path, digest_of(path)) == f"has the digest {found} and was written with {written}"
    path.unlink()
    assert describe_damage(path, written) == "cannot be read: No such file or directory"


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "mtp.safetensors"])
def test_weights_that_are_dropped_leave_no_digest_to_the_next(tmp_path, name):
    for each in (name, "theirs"):
        (tmp_path / each).write_bytes(b"bytes")
        write_digest(tmp_path / each, digest_file(tmp_path / each))
    drop_model_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs", "theirs.xxh3"]


def test_a_digest_is_on_the_disk_when_it_is_written(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    with DiskRecord(tmp_path) as disk:
        write_digest(tmp_path / "file", digest_file(tmp_path / "file"))
        assert disk.unsynced() == ["file.xxh3"], (
            "its name, which is synced by the function that gives the folder its name"
        )
        sync_path(tmp_path)
        assert disk.unsynced() == []
