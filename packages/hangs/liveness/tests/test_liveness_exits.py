"""What ends a process for certain, and what only looks like its end: in interpreters of their own, without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat_liveness._process import exceptions

WATCHED = """
import atexit, code, functools, os, pdb, sys, threading, time, traceback
from offbeat_liveness._process.exceptions import ErrorNotes, ExitHook

def say(error, is_certain):
    kind = "certain" if is_certain else "words"
    print(f"{kind}: {type(error).__name__ if error else None}", flush=True)

notes = ErrorNotes()
"""
HOOK = "hook = ExitHook(say, notes)\n"
BEFORE = "certain: None"

KEEPS_RUNNING = {
    "prints an error that it has caught": """
try:
    raise OSError("stale file handle")
except OSError:
    sys.excepthook(*sys.exc_info())
""",
    "prints an error of another function": """
def load():
    raise OSError("stale file handle")
def attempt():
    try:
        load()
    except OSError as error:
        return error
error = attempt()
sys.excepthook(type(error), error, error.__traceback__)
""",
    "reports a bare error that was never raised": "sys.excepthook(OSError, OSError('no space'), None)\n",
    "routes the errors of threads to sys.excepthook": """
def run():
    try:
        raise ConnectionError("metrics server is away")
    except ConnectionError:
        sys.excepthook(*sys.exc_info())
thread = threading.Thread(target=run)
thread.start()
thread.join()
""",
    "routes the errors of threads by threading.excepthook": """
threading.excepthook = lambda raised: sys.excepthook(raised.exc_type, raised.exc_value, raised.exc_traceback)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
""",
    "routes what cannot be raised to sys.excepthook": """
sys.unraisablehook = lambda raised: sys.excepthook(raised.exc_type, raised.exc_value, raised.exc_traceback)
class Resource:
    def __del__(self):
        raise OSError("already closed")
Resource()
""",
    "routes the errors of tasks to sys.excepthook": """
import asyncio
async def fail():
    raise TimeoutError("engine 3")
async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda loop, said: sys.excepthook(type(said["exception"]), said["exception"], said["exception"].__traceback__)
    )
    asyncio.create_task(fail())
    await asyncio.sleep(0.05)
    import gc; gc.collect()
asyncio.run(main())
""",
    "looks at an error after the fact": """
try:
    raise OSError("stale file handle")
except OSError:
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
    sys.excepthook(*sys.exc_info())
sys.last_value = None
""",
    "calls a chain of hooks, one of which is a method": """
class Crash:
    def __init__(self):
        self.inner = sys.excepthook
        sys.excepthook = self.report
    def report(self, kind, error, trace):
        self.inner(kind, error, trace)
Crash()
try:
    raise OSError("stale file handle")
except OSError:
    sys.excepthook(*sys.exc_info())
""",
    "has a console report what is typed": "code.InteractiveConsole().runsource('no_such_name')\n",
}


def run_program(text: str, *options: str, typed: str = "", **environment: str) -> list[str]:
    command = [sys.executable, *options, "-c", WATCHED + text]
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )
    assert "Error in sys.excepthook" not in done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("certain", "words", "went on"))]


@pytest.mark.parametrize("program", KEEPS_RUNNING.values(), ids=KEEPS_RUNNING)
def test_a_program_that_keeps_running_has_not_ended(program: str) -> None:
    said = run_program(HOOK + program + "print('went on')\n")
    assert said[-2:] == ["went on", BEFORE], said
    assert all(line.startswith("words: ") for line in said[:-2]), said


UNCAUGHT = "def train():\n    raise ValueError('loss is nan')\ntrain()\n"
ENDS = {
    "a script": HOOK + UNCAUGHT,
    "a script that was hooked before": """
def report(kind, error, trace):
    print("crashed")
sys.excepthook = functools.partial(report)
"""
    + HOOK
    + UNCAUGHT,
    "a chain of hooks": HOOK
    + """
class Crash:
    def __init__(self):
        self.inner = sys.excepthook
    def __call__(self, kind, error, trace):
        self.inner(kind, error, trace)
sys.excepthook = functools.partial(Crash())
"""
    + UNCAUGHT,
    "a hook that keeps it to itself": HOOK + "sys.excepthook = lambda *said: print('crashed')\n" + UNCAUGHT,
    "a hook with a debugger": HOOK
    + """
inner = sys.excepthook
def debug(kind, error, trace):
    inner(kind, error, trace)
    pdb.post_mortem(trace)
sys.excepthook = debug
"""
    + UNCAUGHT,
    "a second error after one that it has reported": HOOK
    + "try:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())\n"
    + UNCAUGHT,
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_an_exception_that_leaves_the_program_is_its_end(program: str) -> None:
    said = run_program(program, typed="quit\n")
    assert [line for line in said if line.startswith("certain")] == ["certain: ValueError"]


def test_a_module_that_python_runs_ends_like_a_script(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WATCHED + HOOK + UNCAUGHT)
    done = subprocess.run(
        [sys.executable, "-m", "job"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["certain: ValueError"], done.stderr


def test_a_console_after_an_exception_is_not_the_end() -> None:
    said = run_program(HOOK + UNCAUGHT, "-i", typed="print('went on')\nquit()\n")
    assert said[0] == "words: ValueError"
    assert said[1:] == ["went on", "certain: ValueError"]


def test_functions_of_the_exit_may_be_called_by_a_program_that_becomes_another(tmp_path: Path) -> None:
    """As launchers do before os.execv."""
    then = "import sys; print('went on')"
    said = run_program(HOOK + f"atexit._run_exitfuncs()\nos.execv(sys.executable, [sys.executable, '-c', {then!r}])\n")
    assert said == ["words: None", "went on"]


CHILD = """
import multiprocessing
def be_rank(fails):
    hook = ExitHook(say, notes)
    if fails:
        raise ValueError("loss is nan")
child = multiprocessing.get_context("fork").Process(target=be_rank, args=({fails},))
child.start()
child.join()
"""


@pytest.mark.parametrize(("fails", "said"), [(True, "certain: ValueError"), (False, "certain: None")])
def test_a_child_of_multiprocessing_ends_when_its_function_does(fails: bool, said: str) -> None:
    assert run_program(CHILD.format(fails=fails)) == [said]


FORKED = """
hook = ExitHook(say, notes)
child = os.fork()
if child == 0:
    hook = ExitHook(say, notes)
    try:
        raise ValueError("loss is nan")
    except ValueError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
os.waitpid(child, 0)
"""


def test_a_child_of_a_launcher_leaves_last_words() -> None:
    """A program that forks by hand calls the hook by hand: that it is the end is known once the process is gone."""
    assert run_program(FORKED) == ["words: ValueError", BEFORE]


def test_a_program_that_reports_many_errors_does_not_pay_for_each() -> None:
    many = "for _ in range(100):\n    try:\n        1 / 0\n    except ZeroDivisionError:\n"
    said = run_program(HOOK + many + "        sys.excepthook(*sys.exc_info())\nprint(len(notes.lines_for('rank 0')))\n")
    assert len([line for line in said if line.startswith("words")]) <= 1 + 60 / exceptions.LAST_WORDS_S
    assert said.count("words: ZeroDivisionError") < 100


def test_what_a_program_has_printed_is_reported_with_the_verdict() -> None:
    report = KEEPS_RUNNING["prints an error that it has caught"]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + HOOK + report + "print(*notes.lines_for('rank 1'))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("rank 1"))
    assert line.startswith("rank 1: it reported OSError: stale file handle at <string>:")
    assert "to sys.excepthook, and went on, 0 s ago" in line
