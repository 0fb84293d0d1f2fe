"""Sessions side by side: all run, what failed is named, and outputs are not mixed."""

import os
import signal
import subprocess
import sys
import time

from side_by_side import run_side_by_side

SAYS_TWICE = "import time; print('{0} one', flush=True); time.sleep(0.5); print('{0} two')"


def test_outputs_come_in_one_piece_and_failures_are_named(capsys):
    commands = {name: [sys.executable, "-c", SAYS_TWICE.format(name)] for name in ("first", "second")}
    commands["third"] = [sys.executable, "-c", "print('three'); raise SystemExit(3)"]
    assert run_side_by_side(commands, 2) == ["third"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    for name in ("first", "second"):
        start = lines.index(f"{name} one")
        assert lines[start + 1] == f"{name} two"
        assert lines[start + 2].startswith(f"== {name} passed after ")
    assert any(line.startswith("== third failed (3) after ") for line in lines)
    assert lines[-2:] == ["== third failed; its last lines:", "three"]


def test_an_interrupt_ends_what_runs(tmp_path):
    started = tmp_path / "started"
    sleeps = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        "import signal, sys; from side_by_side import run_side_by_side; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's background jobs ignore it
        f"run_side_by_side({{'sleeps': [sys.executable, '-c', {sleeps!r}]}}, 1)"
    )
    tools = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tools, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end_s = time.monotonic() + 20
    while not (started.exists() and started.read_text()) and time.monotonic() < end_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert "== sleeps failed (-15) after" in output
    assert process.returncode != 0
    assert not os.path.exists(f"/proc/{started.read_text()}")
