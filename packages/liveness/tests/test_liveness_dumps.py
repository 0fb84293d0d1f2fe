"""Dumps are written from a thread of their own: a folder that hangs holds up nobody."""

import os
import threading
import time
from pathlib import Path

import pytest

from offbeat_liveness import _dumps
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import MAX_VERDICTS, DumpWriter, read_heads, read_verdicts
from offbeat_liveness._process.snapshot import ProcessSnapshot

LIMIT_S = 20.0


def a_head(rank: int, still_s: float = 0.0) -> ProcessSnapshot:
    return ProcessSnapshot(key=f"vm:{rank}", name=f"rank {rank}", rank=rank, pid=rank, host="vm", still_s=still_s)


def a_verdict(time_s: float) -> Verdict:
    return Verdict(kind="starved", headline="", stalled_s=1.0, time_s=time_s)


def writing_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "offbeat-liveness-dumps"]


def test_what_was_handed_over_is_there_after_a_flush_and_no_thread_is(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path)
    assert not writing_threads()
    writer.write_head(a_head(0))
    writer.write_verdict(a_verdict(1.0))
    assert writer.flush(LIMIT_S)
    assert [head.name for head in read_heads(tmp_path)] == ["rank 0"]
    assert len(read_verdicts(tmp_path)) == 1
    for each in writing_threads():
        each.join(LIMIT_S)
    assert not writing_threads()


def test_without_a_folder_nothing_is_written_and_no_thread_starts() -> None:
    writer = DumpWriter(None)
    writer.write_head(a_head(0))
    assert not writing_threads()
    assert writer.flush(0.0)


def test_a_folder_that_hangs_holds_up_nobody_and_the_newest_is_written_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, really_write = threading.Event(), _dumps.write

    def write(*args: object, **named: object) -> None:
        hangs.wait(LIMIT_S)
        really_write(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(_dumps, "write", write)
    writer = DumpWriter(tmp_path)
    began_s = time.monotonic()
    for number in range(1000):
        writer.write_head(a_head(number % 3, still_s=number))
        writer.write_verdict(a_verdict(float(number)))
    assert not writer.flush(0.1)
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert len(writer._heads) <= 3
    assert len(writer._verdicts) <= MAX_VERDICTS
    hangs.set()
    assert writer.flush(LIMIT_S)
    assert [head.still_s for head in read_heads(tmp_path)] == [999.0, 997.0, 998.0]
    assert max(each.time_s for each in read_verdicts(tmp_path)) == 999.0


def test_a_fork_while_it_writes_leaves_the_child_able_to_write(tmp_path: Path) -> None:
    """A child makes a writer of its own: that of its parent has no thread any more."""
    DumpWriter(tmp_path).write_head(a_head(0))
    pid = os.fork()
    if pid == 0:
        writer = DumpWriter(tmp_path)
        writer.write_head(a_head(1))
        os._exit(0 if writer.flush(LIMIT_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_dump_is_for_this_user_alone(tmp_path: Path) -> None:
    _dumps.write(tmp_path, "head-rank-0-1.json", {"format": 1})
    assert (tmp_path / "head-rank-0-1.json").stat().st_mode & 0o077 == 0
