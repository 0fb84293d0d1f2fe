"""Files of the dump folder, last words, and the command that reads them."""

import dataclasses
import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_liveness import _dumps
from offbeat_liveness._cli import main
from offbeat_liveness._process.exceptions import CrashFile, path_of, read_crash
from offbeat_liveness._process.proc import HOST
from offbeat_liveness._process.snapshot import ProcessSnapshot, ThreadSnapshot, Wait


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


def a_head(rank: int, *waits: Wait, name: str = "") -> ProcessSnapshot:
    return ProcessSnapshot(
        key=f"vm:{rank}", name=name or f"rank {rank}", rank=rank, world="w", world_size=2, pid=rank, host="vm",
        time_s=1e9, waits=waits, still_s=90.0, threads=(ThreadSnapshot(name="MainThread", still_s=90.0),),
    )  # fmt: skip


def test_dumps_are_read_back_and_the_name_before_the_rank_is_forgotten(tmp_path: Path) -> None:
    _dumps.write_head(tmp_path, a_head(1, name="pid 1"))
    _dumps.write_head(tmp_path, a_head(1))
    _dumps.write_head(tmp_path, a_head(0))
    assert [head.name for head in _dumps.read_heads(tmp_path)] == ["rank 0", "rank 1"]
    assert not list(tmp_path.glob("*.partial"))


def test_hosts_that_share_a_folder_and_have_the_same_pids_keep_their_dumps(tmp_path: Path) -> None:
    for host in ("0", "node-0", "rank-1-node/0"):
        _dumps.write_head(tmp_path, dataclasses.replace(a_head(1), host=host))
    assert {head.host for head in _dumps.read_heads(tmp_path)} == {"0", "node-0", "rank-1-node/0"}


def test_half_a_file_is_passed_over(tmp_path: Path) -> None:
    _dumps.write_head(tmp_path, a_head(0))
    (tmp_path / "head-rank-7-7.json").write_text('{"key": ')
    assert [head.rank for head in _dumps.read_heads(tmp_path)] == [0]


def test_the_secret_of_a_folder_is_one_and_private(tmp_path: Path) -> None:
    found = {_dumps.shared_secret(tmp_path) for _ in range(3)}
    assert len(found) == 1
    assert (tmp_path / ".secret").stat().st_mode & 0o077 == 0


def test_show_tells_from_heads_alone_what_was_stuck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run was killed before anybody could lead."""
    _dumps.write_head(tmp_path, a_head(0, Wait(kind="declared", what="samples.get", on="rank 1", age_s=90.0)))
    _dumps.write_head(tmp_path, a_head(1))
    assert main(["show", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "starved: rank 0 waits in samples.get; rank 1 is idle" in told
    assert "rank 1 (pid 1 on vm): running, in no wait" in told


def test_show_of_a_folder_without_dumps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "must hold dumps" in capsys.readouterr().err


def test_running_a_script_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/nowhere/train.py"]) == 2
    assert "/nowhere/train.py" in capsys.readouterr().err
