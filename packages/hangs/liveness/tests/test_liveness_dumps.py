"""Dumps: written from a thread of their own, read back, shown; the last words of a crash."""

import dataclasses
import faulthandler
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offbeat_liveness import _dumps
from offbeat_liveness._cli import main
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._dumps import MAX_VERDICTS, DumpWriter, read_heads, read_verdicts
from offbeat_liveness._process.exceptions import CrashFile, path_of, read_crash
from offbeat_liveness._process.proc import HOST
from offbeat_liveness._process.snapshot import ProcessSnapshot, ThreadSnapshot, Wait

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


def test_a_folder_that_hangs_blocks_no_thread_and_the_newest_is_written_in_the_end(
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


def test_last_words_of_a_crash_are_those_of_the_main_thread(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys, threading, time, ctypes, os\n"
        "faulthandler.enable(open(sys.argv[1], 'w'))\n"
        "threading.Thread(target=os.abort).start()\n"
        "def stand():\n    time.sleep(20)\n"
        "stand()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    subprocess.run([sys.executable, script, path_of(tmp_path, "vm", 12)], check=False)
    reason, stack = read_crash(tmp_path, "vm", 12)
    assert reason == "Aborted"
    assert stack[0].file == str(script)
    assert read_crash(tmp_path, "vm", 13) == ("", ())
    assert read_crash(tmp_path, "another/vm", 12) == ("", ()), "hosts that share a folder may have the same pids"


def test_last_words_are_for_this_user_alone_and_are_written_into_no_file_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(faulthandler, "enable", lambda _: None)
    monkeypatch.setattr(faulthandler, "disable", lambda: None)
    crash_file = CrashFile(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path == path_of(tmp_path, HOST, os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    crash_file.close()
    (tmp_path / "another").write_text("kept")
    path.symlink_to(tmp_path / "another")
    CrashFile(tmp_path)
    assert (tmp_path / "another").read_text() == "kept"


def head_of_rank(rank: int, *waits: Wait, name: str = "") -> ProcessSnapshot:
    return ProcessSnapshot(
        key=f"vm:{rank}", name=name or f"rank {rank}", rank=rank, world="w", world_size=2, pid=rank, host="vm",
        time_s=1e9, waits=waits, still_s=90.0, threads=(ThreadSnapshot(name="MainThread", still_s=90.0),),
    )  # fmt: skip


def test_dumps_are_read_back_and_the_name_before_the_rank_is_forgotten(tmp_path: Path) -> None:
    _dumps.write_head(tmp_path, head_of_rank(1, name="pid 1"))
    _dumps.write_head(tmp_path, head_of_rank(1))
    _dumps.write_head(tmp_path, head_of_rank(0))
    assert [head.name for head in _dumps.read_heads(tmp_path)] == ["rank 0", "rank 1"]
    assert not list(tmp_path.glob("*.partial"))


def test_hosts_that_share_a_folder_and_have_the_same_pids_keep_their_dumps(tmp_path: Path) -> None:
    for host in ("0", "node-0", "rank-1-node/0"):
        _dumps.write_head(tmp_path, dataclasses.replace(head_of_rank(1), host=host))
    assert {head.host for head in _dumps.read_heads(tmp_path)} == {"0", "node-0", "rank-1-node/0"}


def test_half_a_file_is_passed_over(tmp_path: Path) -> None:
    _dumps.write_head(tmp_path, head_of_rank(0))
    (tmp_path / "head-rank-7-7.json").write_text('{"key": ')
    assert [head.rank for head in _dumps.read_heads(tmp_path)] == [0]


def test_the_secret_of_a_folder_is_one_and_private(tmp_path: Path) -> None:
    found = {_dumps.shared_secret(tmp_path) for _ in range(3)}
    assert len(found) == 1
    assert (tmp_path / ".secret").stat().st_mode & 0o077 == 0


def test_show_reports_from_heads_alone_what_was_stuck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run was killed before anybody could lead."""
    _dumps.write_head(tmp_path, head_of_rank(0, Wait(kind="declared", what="samples.get", on="rank 1", age_s=90.0)))
    _dumps.write_head(tmp_path, head_of_rank(1))
    assert main(["show", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "starved: rank 0 waits in samples.get; rank 1 is idle" in output
    assert "rank 1 (pid 1 on vm): running then, in no wait" in output


def test_show_of_a_folder_without_dumps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "must hold dumps" in capsys.readouterr().err


def test_running_a_script_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/nowhere/train.py"]) == 2
    assert "/nowhere/train.py" in capsys.readouterr().err
