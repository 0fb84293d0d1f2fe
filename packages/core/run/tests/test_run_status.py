"""A command says what it is doing from its first moment on: in a terminal on one line, elsewhere in few."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from offbeat_run import Progress, doing, so_far
from offbeat_run._console.status import Status, showing_status
from offbeat_testing import read_terminal

LOADS = """
import sys
from offbeat_run import doing, run_command, so_far
def main():
    doing("loading the model", "smollm2")
    import json.tool, time
    {body}
run_command(main, program="app")
"""

UNTIL_DRAWN = """from offbeat_run._console.status import current_status
while not current_status()._is_drawn:
    time.sleep(0.01)"""


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def status_on_a_pipe(clock):
    """A status, and what has been written to its pipe since the last call."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    def said():
        try:
            return os.read(ours, 1 << 16).decode().splitlines()
        except BlockingIOError:
            return []

    return Status(theirs, is_terminal=False, clock=clock), said


def run(body, *, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    code = LOADS.format(body=body.replace("\n", "\n    "))
    return subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=stderr, text=True, timeout=60)


def run_in_a_terminal(body, **streams):
    """All that a terminal gets of it."""
    ours, theirs = pty.openpty()
    done = run(body, **{"stdout": theirs, "stderr": theirs, **streams})
    os.close(theirs)
    return read_terminal(ours), done


def test_the_first_sign_comes_at_once_and_the_next_when_nothing_was_said_for_three_seconds():
    clock = Clock()
    status, said = status_on_a_pipe(clock)
    status.doing("loading the model", "smollm2")
    assert said() == ["loading the model: smollm2 ..."]
    clock.now_s += 2.9
    status.tick()
    assert said() == []
    clock.now_s += 0.1
    status.tick()
    assert said() == ["loading the model: smollm2 (3 s)"]
    status.so_far("12 of 64 layers")
    status.doing("loading the tokenizer")
    assert said() == [], "a stage that ends within three seconds is no line of a log"
    clock.now_s += 3.0
    status.tick()
    assert said() == ["loading the tokenizer (3 s)"]


def test_what_is_printed_is_a_sign_too():
    clock = Clock()
    status, said = status_on_a_pipe(clock)
    status.printing("a table\n")
    status.doing("loading the model")
    clock.now_s += 2.0
    status.printing("a line\n")
    clock.now_s += 2.0
    status.tick()
    assert said() == []
    clock.now_s += 1.0
    status.tick()
    assert said() == ["loading the model (5 s)"]


def test_the_log_of_a_stage_that_lasts_for_hours_stays_small():
    clock = Clock()
    status, said = status_on_a_pipe(clock)
    status.doing("update 1")
    assert said() == ["update 1 ..."]
    at_s = []
    while clock.now_s < 100.0 + 7200:
        clock.now_s += 0.5
        status.tick()
        at_s += [clock.now_s - 100.0 for _ in said()]
    assert at_s[:3] == [3.0, 6.0, 9.0]
    gaps_s = [later - earlier for earlier, later in zip([0.0, *at_s], at_s, strict=False)]
    assert max(gaps_s) <= 60.5
    assert all(gap_s <= max(3.0, at / 9) for gap_s, at in zip(gaps_s, at_s, strict=True))
    assert len(at_s) < 160


def test_a_pipe_gets_the_first_line_before_what_comes_after_it_is_imported():
    code = LOADS.format(body="print('{}')")
    words = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    said = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert said.index("loading the model: smollm2 ...") < said.index("json.tool")
    assert done.stdout == "{}\n"


def test_a_stage_that_lasts_is_written_to_a_pipe_with_its_seconds():
    words = [sys.executable, "-c", LOADS.format(body="so_far('12 of 64')\n    sys.stdin.read()")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "loading the model: smollm2 ...\n"
        began_s = time.monotonic()
        second = process.stderr.readline()
        assert time.monotonic() - began_s > 2.5
        assert re.fullmatch(r"loading the model: 12 of 64 \([3-9] s\)\n", second)
        process.stdin.close()


def test_a_terminal_has_one_line_that_gives_way_to_what_is_printed_and_is_gone_at_the_end():
    text, done = run_in_a_terminal(f"print('a result')\n{UNTIL_DRAWN}\nraise SystemExit(0)")
    assert done.returncode == 0
    assert text.startswith("\r\x1b[K")
    assert "loading the model: smollm2" in text
    before, after = text.split("a result\r\n")
    assert before.endswith("\r\x1b[K"), "the status line is removed before something is printed"
    assert after.endswith("\r\x1b[K"), "nothing of it is left at the end"
    assert text.count("\n") == 1, "the line is overwritten"


def test_an_error_takes_the_place_of_the_status_line():
    text, done = run_in_a_terminal("import offbeat_core\nraise offbeat_core.ConfigError('what is wrong')")
    assert done.returncode == 2
    assert "\x1b[Kerror: what is wrong\r\n" in text


def test_a_line_that_is_being_written_is_not_overwritten():
    text, _ = run_in_a_terminal("print('bar 50%', end='', flush=True)\ntime.sleep(1.3)\nprint(' done')")
    assert "bar 50% done\r\n" in text


def test_the_terminal_is_used_where_one_of_the_streams_is_a_file(tmp_path):
    with (tmp_path / "out").open("w") as out:
        text, _ = run_in_a_terminal("print('to the file')", stdout=out)
    assert "loading the model" in text
    assert (tmp_path / "out").read_text() == "to the file\n"
    with (tmp_path / "err").open("w") as err:
        text, _ = run_in_a_terminal("print('to the terminal')", stderr=err)
    assert "loading the model" in text
    assert (tmp_path / "err").read_text() == ""


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text, _ = run_in_a_terminal("print('done')")
    assert text == "loading the model: smollm2 ...\r\ndone\r\n"


IN_BACKGROUND = """
import os, signal, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if os.fork():
    os.wait()
    sys.exit()
os.setpgid(0, 0)
from offbeat_run import doing, run_command
def main():
    doing("loading the model")
    time.sleep(0.8)
    print("done")
run_command(main, program="app")
"""


def test_a_command_in_the_background_prints_its_results_alone():
    pid, ours = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", IN_BACKGROUND])
    assert read_terminal(ours) == "done\r\n"
    os.waitpid(pid, 0)


def test_words_of_a_file_are_no_command_for_the_terminal_and_secrets_stay_secret(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "hunter2hunter2")
    status, said = status_on_a_pipe(Clock())
    status.doing("loading \x1b]0;owned\x07\nmodel", "hunter2hunter2")
    (line,) = said()
    assert "\x1b" not in line
    assert "hunter2" not in line


def test_a_reader_that_has_left_ends_no_command():
    ours, theirs = os.pipe()
    os.close(ours)
    status = Status(theirs, is_terminal=False, clock=Clock())
    status.doing("loading the model")  # no SIGPIPE, no error


def test_without_a_command_nothing_is_said(capfd):
    doing("loading the model")
    so_far("12 of 64")
    assert capfd.readouterr() == ("", "")


def test_streams_that_are_no_files_get_no_status(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with showing_status():
        doing("loading the model")
    assert out.getvalue() == ""


@pytest.mark.parametrize("is_over", [False, True])
def test_the_panel_of_a_run_has_the_status_in_it_and_no_line_beside_it(is_over):
    ours, theirs = pty.openpty()
    out = os.fdopen(theirs, "w")
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with showing_status(theirs):
        doing("update 1 of 4", "12 of 64 samples")
        with Progress(4, console=console) as progress:
            progress.update(0, {})
            if not is_over:
                time.sleep(1.2)  # a tick, and a refresh of the panel
    out.close()
    text = read_terminal(ours)
    assert "update 1 of 4: 12 of 64 samples" in text.split("updates 0/4")[1]
    assert "\r\x1b[K" not in text.split("updates 0/4", 1)[1].rsplit("updates 0/4", 1)[0]
    assert "12 of 64" not in text.rsplit("updates 0/4", 1)[1], "the last panel no longer shows a stage"
