"""What a terminal would obey is written as an escape wherever a line is printed.

The rule is that of offbeat-core, whose tests try it; a contract holds the two alike.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat_liveness._announcer import say
from offbeat_liveness._cli import main
from offbeat_liveness._dumps import DumpWriter
from offbeat_liveness._process.snapshot import ProcessSnapshot, Wait

CLEARS = "\x1b[2J"  # the screen of a terminal that obeys it


def test_a_monitor_reports_names_as_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    say(f"trainer{CLEARS} is idle")
    assert capfd.readouterr().err == "trainer\\x1b[2J is idle\n"


def test_dumps_of_whatever_names_are_shown_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wait = Wait(kind="declared", what=f"update{CLEARS}", age_s=9.0, on=f"trainer{CLEARS}")
    writer = DumpWriter(tmp_path)
    writer.write_head(ProcessSnapshot(key="vm:1", name=f"driver{CLEARS}", pid=1, time_s=time.time(), waits=(wait,)))
    assert writer.flush(20.0)
    assert main(["show", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "starved: driver\\x1b[2J waits in update\\x1b[2J for 'trainer\\x1b[2J'" in output
    assert "\x1b" not in output


def test_an_error_shows_a_path_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / CLEARS)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path)
    writer.write_head(ProcessSnapshot(key="vm:1", name="driver", pid=1, time_s=time.time()))
    assert writer.flush(20.0)
    line = [sys.executable, "-m", "offbeat_liveness", "show", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
