"""What is kept between runs is right or not there at all."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat_hanglint._reading.cache import FactCache, default_cache_folder, tidy

FACTS = {"calls": [["f", 1]], "name": "ä\udcff"}


def entries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.json"))


def test_facts_come_back_for_the_same_content_name_version_and_python_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FactCache(tmp_path, "1")
    assert cache.read(b"a = 1", "m") is None
    cache.write(b"a = 1", "m", FACTS)
    assert cache.read(b"a = 1", "m") == FACTS
    assert cache.read(b"a = 2", "m") is None
    assert cache.read(b"a = 1", "n") is None
    assert FactCache(tmp_path, "2").read(b"a = 1", "m") is None
    assert (cache.num_hits, cache.num_misses) == (1, 3)
    with monkeypatch.context() as patch:  # what a file says depends on the grammar that reads it
        patch.setattr(sys, "version_info", (3, sys.version_info[1] + 1, 0, "final", 0))
        assert FactCache(tmp_path, "1").read(b"a = 1", "m") is None
    assert FactCache(tmp_path, "1").read(b"a = 1", "m") == FACTS


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 10**6, b"null"], ids=["empty", "cut", "bytes", "deep", "null"]
)
def test_a_damaged_entry_is_as_good_as_none_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    cache = FactCache(tmp_path, "1")
    cache.write(b"a", "m", FACTS)
    (entry,) = entries(tmp_path)
    entry.write_bytes(content)
    assert cache.read(b"a", "m") is None
    cache.write(b"a", "m", FACTS)
    assert cache.read(b"a", "m") == FACTS


def test_a_place_that_cannot_be_written_keeps_nothing_and_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = FactCache(tmp_path / "file", "1")
    cache.write(b"a", "m", FACTS)
    assert cache.read(b"a", "m") is None
    assert tidy(tmp_path / "file") == 0
    assert FactCache(None, "1").read(b"a", "m") is None


def test_many_processes_that_write_one_entry_leave_it_whole(tmp_path: Path) -> None:
    def work(_: int) -> object:
        cache = FactCache(tmp_path, "1")
        cache.write(b"a", "m", ["x" * 10_000])
        return cache.read(b"a", "m")

    with ThreadPoolExecutor(8) as pool:
        assert all(found == ["x" * 10_000] for found in pool.map(work, range(64)))
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_what_was_not_used_for_a_month_is_deleted_once_a_day(tmp_path: Path) -> None:
    cache, now_s = FactCache(tmp_path, "1"), time.time()
    long_ago_s, lately_s = now_s - 31 * 24 * 3600, now_s - 29 * 24 * 3600
    # When each was last read, and when it was written. Disks that do not note what is read leave the first as it was.
    for content, times_s in (
        (b"old", (long_ago_s, long_ago_s)),
        (b"read", (lately_s, long_ago_s)),
        (b"written", (long_ago_s, lately_s)),
    ):
        before = set(entries(tmp_path))
        cache.write(content, "m", FACTS)
        (entry,) = set(entries(tmp_path)) - before
        os.utime(entry, times_s)
    assert tidy(tmp_path, now_s) == 1
    assert [cache.read(content, "m") for content in (b"old", b"read", b"written")] == [None, FACTS, FACTS]
    for entry in entries(tmp_path):
        os.utime(entry, (long_ago_s, long_ago_s))
    assert tidy(tmp_path) == 0
    assert tidy(tmp_path, time.time() + 25 * 3600) == 2


def test_it_lies_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "hanglint"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / ".cache" / "hanglint"
