"""The sandbox: what a hostile program does, it does to itself. Real processes, by bubblewrap."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_core import BackendError, ConfigError, DataError
from offbeat_data import ProgramRun, Prompt, RewardConfig, build_reward
from offbeat_data._scoring.code.assertions import run_assertions
from offbeat_data._scoring.code.code import prints_alike, program_of
from offbeat_data._scoring.code.tests import read_tests
from offbeat_data._scoring.sandbox import watching
from offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox, ProcessSandbox, Sandbox
from offbeat_data._scoring.sandbox.watching import ProgramLimits

HAS_BUBBLEWRAP = shutil.which("bwrap") is not None
needs_bubblewrap = pytest.mark.skipif(not HAS_BUBBLEWRAP, reason="no bubblewrap on this machine")
LIMITS = ProgramLimits(timeout_s=20.0, memory_bytes=1 << 28, disk_bytes=1 << 22, output_bytes=1 << 16, processes=8)
MARK = "offbeat-sandbox-escape"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return BubblewrapSandbox(LIMITS)


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the reward's process and a variable of its environment."""
    path = tmp_path / "answers.jsonl"
    path.write_text("the answer is 42")
    path.chmod(0o644)
    monkeypatch.setenv("OFFBEAT_SECRET_KEY", "sk-of-the-judge")
    return path


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.05)


def marked_processes() -> list[str]:
    """Command lines of all processes that a hostile program of these tests may have left behind."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if MARK in words and int(folder.name) != os.getpid():
            found.append(words)
    return found


@needs_bubblewrap
def test_a_program_reads_and_prints_and_its_exit_is_told(sandbox: Sandbox) -> None:
    run = sandbox.run("import sys\nprint(int(input()) * 2)\nprint('é', file=sys.stderr)\nsys.exit(3)", "21\n")
    assert run == ProgramRun(ended="exited", code=3, stdout="42\n", stderr="é\n")


HOSTILE = {
    "environment": "import os\nprint(os.environ, open('/proc/self/environ').read(), open('/proc/1/environ').read())",
    "files": "import os\nfor top in ('/home', '/root', '/work', '/etc', '/var', '/run', '/proc/1/root/home'):\n"
    "    for folder, folders, names in os.walk(top):\n        if 'lib' in folders:\n            folders.clear()\n"
    "        print([folder + '/' + name for name in names])\nprint(open(SECRET).read())",
    "proc": "import os\nfor pid in os.listdir('/proc'):\n    if pid.isdigit():\n"
    "        for name in ('environ', 'cmdline', 'maps', 'mem', 'fd'):\n            try:\n"
    "                print(pid, open(f'/proc/{pid}/{name}', errors='replace').read(99))\n"
    "            except Exception as error:\n                print(pid, type(error).__name__)",
}


@needs_bubblewrap
@pytest.mark.parametrize("attack", HOSTILE)
def test_nothing_of_the_reward_process_can_be_read(attack: str, sandbox: Sandbox, secret: Path) -> None:
    run = sandbox.run(HOSTILE[attack].replace("SECRET", repr(str(secret))), "")
    assert run.ended == "exited"
    assert attack != "files" or "FileNotFoundError" in run.stderr
    for secret in ("sk-of-the-judge", "the answer is 42", "answers.jsonl", str(os.getpid()), "pytest"):
        assert secret not in run.stdout, f"{attack}: {run.stdout}"


@needs_bubblewrap
def test_a_program_reaches_no_network_and_no_server_of_this_machine(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        code = (
            "import socket\nfor place in (('127.0.0.1', PORT), ('192.0.2.1', 80), ('1.1.1.1', 53)):\n"
            "    try:\n        socket.create_connection(place, 2)\n        print('connected')\n"
            "    except OSError as error:\n        print('refused')"
        )
        run = sandbox.run(code.replace("PORT", str(port)), "")
        assert run.stdout.split() == ["refused"] * 3
        with pytest.raises(TimeoutError):
            server.accept()


@needs_bubblewrap
def test_signals_reach_no_process_outside(sandbox: Sandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as bystander:
        code = (
            "import os, signal\nfor pid in (PID, PARENT, os.getppid(), 1, -1):\n    try:\n"
            "        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass"
        )
        run = sandbox.run(code.replace("PID", str(bystander.pid)).replace("PARENT", str(os.getpid())), "")
        assert run.ended == "exited"
        assert bystander.poll() is None
        bystander.kill()


@needs_bubblewrap
def test_a_fork_bomb_is_bounded_and_gone_with_its_program(sandbox: Sandbox) -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    code = (
        "import os, sys, time\nmade = 0\n"
        "for _ in range(200):\n    try:\n        if not os.fork():\n            time.sleep(600)\n        made += 1\n"
        "    except OSError:\n        pass\nprint(made)"
    )
    run = sandbox.run(code, "")
    assert 1 <= int(run.stdout) < LIMITS.processes
    wait_until(lambda: len(list(Path("/proc").glob("[0-9]*"))) < before + 100, "processes to be gone", 10)
    run = BubblewrapSandbox(ProgramLimits(timeout_s=2.0, processes=8)).run("import os\nwhile True:\n    os.fork()", "")
    assert run.ended in ("timed_out", "exited")


@needs_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("x = bytearray(1 << 30)", id="at once"),
        pytest.param("x = []\nwhile True:\n    x.append(bytearray(1 << 24))", id="bit by bit"),
        pytest.param("import mmap\nx = mmap.mmap(-1, 1 << 30)", id="mapped"),
    ],
)
def test_memory_is_bounded(code: str, sandbox: Sandbox) -> None:
    run = sandbox.run(code, "")
    assert run.ended == "exited"
    assert run.code != 0
    assert "Error" in run.stderr


@needs_bubblewrap
def test_files_are_bounded_and_gone_afterwards(sandbox: Sandbox) -> None:
    one = "open('/tmp/big', 'wb').write(b'x' * (1 << 23))"
    many = "for number in range(64):\n    open(f'/tmp/{number}', 'wb').write(b'x' * (1 << 20))"
    for code in (one, many):
        run = sandbox.run(code, "")
        assert (run.ended, run.code != 0) == ("exited", True), code
    code = (
        "import os\nopen('/tmp/here', 'w').write('x')\n"
        "places = ('/x', '/usr/x', '/dev/shm/x', '/dev/x', '/sandbox/x', '/proc/sys/kernel/hostname', PYTHON + '/x')\n"
        "for path in places:\n"
        "    try:\n        open(path, 'w').write('x')\n        print('wrote', path)\n"
        "    except OSError:\n        pass\n"
        "print(sorted(os.listdir('/tmp')))"
    )
    for _ in range(2):
        assert sandbox.run(code.replace("PYTHON", repr(sys.base_prefix)), "").stdout == "['here']\n"


@needs_bubblewrap
def test_endless_output_ends_the_program(sandbox: Sandbox) -> None:
    run = sandbox.run("while True:\n    print('x' * 1000)", "")
    assert run.ended == "printed_too_much"
    assert len(run.stdout) <= LIMITS.output_bytes


ESCAPES = {
    "sleeps": "import time\ntime.sleep(600)",
    "computes": "while True:\n    pass",
    "closes what it prints to": "import os, time\nfor fd in (0, 1, 2):\n    os.close(fd)\ntime.sleep(600)",
    "ignores signals": "import signal, time\nfor number in range(1, 32):\n    try:\n"
    "        signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\ntime.sleep(600)",
    "leaves a session": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        os.execv('/bin/sleep', ['MARK', '600'])\n    os._exit(0)\ntime.sleep(600)",
}


@needs_bubblewrap
@pytest.mark.parametrize("escape", ESCAPES)
def test_a_time_limit_holds_and_leaves_nothing_running(escape: str) -> None:
    sandbox = BubblewrapSandbox(ProgramLimits(timeout_s=1.0, processes=8))
    started_s = time.monotonic()
    run = sandbox.run(ESCAPES[escape].replace("MARK", MARK), "")
    assert run.ended == "timed_out" or (escape == "computes" and run.code != 0), run
    assert time.monotonic() - started_s < 15
    wait_until(lambda: not marked_processes(), "what it has started to be gone", 5)


def test_a_program_that_takes_back_what_it_prints_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it may open the pipe, it can be faster than the reader that was notified of something to read."""
    ready = watching._ready

    def taken(*args: Any) -> Any:
        found = ready(*args)
        for key, _ in found:
            os.read(key.fd, 1 << 16)
        return found

    monkeypatch.setattr(watching, "_ready", taken)
    started_s = time.monotonic()
    run = ProcessSandbox(ProgramLimits(timeout_s=1.0)).run("import time\nprint('x', flush=True)\ntime.sleep(50)", "")
    assert (run.ended, run.stdout) == ("timed_out", "")
    assert time.monotonic() - started_s < 30


@needs_bubblewrap
def test_a_child_that_is_left_behind_ends_with_its_program(sandbox: Sandbox) -> None:
    code = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.close(1), os.close(2)\n"
        f"    os.execv('/bin/sleep', ['{MARK}', '600'])\nprint('done')"
    )
    started_s = time.monotonic()
    assert sandbox.run(code, "").stdout == "done\n"
    assert time.monotonic() - started_s < 15
    wait_until(lambda: not marked_processes(), "the child to be gone", 5)


@needs_bubblewrap
def test_a_program_ends_with_the_process_that_scores(tmp_path: Path) -> None:
    script = (
        "from offbeat_data import ProgramLimits\nfrom offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox\n"
        "sandbox = BubblewrapSandbox(ProgramLimits(timeout_s=600.0))\nprint('ready', flush=True)\n"
        f"sandbox.run(\"import os; os.execv('/bin/sleep', ['{MARK}-orphan', '600'])\", '')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as scorer:
        assert scorer.stdout is not None
        assert scorer.stdout.readline() == "ready\n"

        def runs() -> bool:
            return any(words.startswith(f"{MARK}-orphan") for words in marked_processes())

        wait_until(runs, "the program to run", 30)
        scorer.send_signal(signal.SIGKILL)
        scorer.wait()
        wait_until(lambda: not runs(), "the program to be gone", 10)


def test_without_bubblewrap_programs_are_refused_unless_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"apt-get install bubblewrap.*reward.code.unsafe_no_isolation = true"):
        build_reward(RewardConfig(name="code"))
    reward = build_reward(RewardConfig(name="code", code={"unsafe_no_isolation": True}))
    assert "WITHOUT ISOLATION" in reward.notes[0]
    assert reward.score(code_prompt(["assert double(2) == 4"]), "def double(x):\n    return 2 * x").value == 1.0


@needs_bubblewrap
def test_a_bubblewrap_that_does_not_isolate_is_refused(bubblewrap_that: Callable[[str], None]) -> None:
    """One that only pretends: it runs what comes after its own words."""
    bubblewrap_that(
        "words = words[words.index('--') + 1:]\n"
        "fds = [int(sys.argv[i + 1]) for i, word in enumerate(sys.argv) if word == '--ro-bind-data']\n"
        "words = [{'/sandbox/main.py': f'/proc/self/fd/{fds[0]}', '/sandbox/inside.py': f'/proc/self/fd/{fds[1]}'}"
        ".get(word, word) for word in words]\nos.execv(words[0], words)\n"
    )
    with pytest.raises(BackendError, match="on this machine it does not isolate"):
        BubblewrapSandbox(LIMITS)


def test_a_sandbox_that_does_not_start_is_no_fault_of_the_program(bubblewrap_that: Callable[[str], None]) -> None:
    """As where the kernel has no namespace left: the 0 of a good program would be learned."""
    said = "bwrap: Creating new namespace failed: No space left on device"
    bubblewrap_that(f"print({said!r}, file=sys.stderr)\nsys.exit(1)\n")
    with pytest.raises(BackendError, match=rf"a sandbox does not start on this machine: {said}\. .*0\.8 or newer"):
        BubblewrapSandbox(LIMITS)
    with pytest.raises(BackendError, match=rf"a sandbox does not start on this machine: {said}\. .*0\.8 or newer"):
        BubblewrapSandbox(LIMITS, is_tried=True).run("", "")


@needs_bubblewrap
def test_one_sandbox_of_two_that_does_not_start_is_no_fault_of_the_program(
    bubblewrap_that: Callable[[str], None], tmp_path: Path
) -> None:
    once, real = str(tmp_path / "once"), shutil.which("bwrap")
    bubblewrap_that(f"try:\n    os.mkdir({once!r})\nexcept OSError:\n    os.execv({real!r}, ['bwrap', *words])\n")
    with pytest.raises(BackendError, match="a sandbox does not start on this machine"):
        run_assertions(BubblewrapSandbox(LIMITS, is_tried=True), "def f(): return 1", "", ["assert f() == 1"])


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="limits on processes hold for every user but root")
def test_root_without_the_rights_of_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may make a user namespace, in which programs still count as root's: there is no limit on processes."""
    monkeypatch.setattr("offbeat_data._scoring.sandbox.sandbox._has_rights", lambda: False)
    with pytest.raises(BackendError, match="does not isolate"):
        BubblewrapSandbox(LIMITS)


def test_a_plain_process_has_limits_too() -> None:
    sandbox = ProcessSandbox(ProgramLimits(timeout_s=3.0, memory_bytes=1 << 28, output_bytes=1 << 12))
    assert sandbox.run("print(input())", "hi").stdout == "hi\n"
    assert "MemoryError" in sandbox.run("x = bytearray(1 << 30)", "").stderr
    assert sandbox.run("while True:\n    print('x' * 99)", "").ended == "printed_too_much"


def code_prompt(tests: Any, **fields: Any) -> Prompt:
    return Prompt(index=0, ids=np.array([1], np.int32), text="Write it.", fields={"tests": tests, **fields})


def code_score(completion: str, tests: Any, **options: Any) -> float:
    config = RewardConfig(name="code", code=options, timeout_s=60.0)
    return build_reward(config).score(code_prompt(tests), completion).value


RIGHT = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds."
WRONG = "```python\ndef add(a, b):\n    return a + abs(b)\n```"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, -2) == 0"]
ECHO = "```py\nprint(sum(map(int, input().split())))\n```"
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": " 9 "[1:]}]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("completion", "tests", "options", "expected"),
    [
        (RIGHT, ASSERTS, {}, 1.0),
        (WRONG, ASSERTS, {}, 0.0),
        (WRONG, ASSERTS, {"score": "share"}, 2 / 3),
        (WRONG, ASSERTS, {"max_tests": 2}, 1.0),
        ("def add(a, b): return a + b", "def check(f):\n    assert f(1, 2) == 3\ncheck(add)", {}, 1.0),
        (ECHO, PAIRS, {}, 1.0),
        (ECHO, '{"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}', {"score": "share"}, 0.5),
        ("```python\nimport sys; sys.exit(0)\n```", ASSERTS, {}, 0.0),
        ("```python\nimport os; os._exit(0)\n```", ASSERTS, {"score": "share"}, 0.0),
        ("```python\nclass Any:\n    pass\nprint('0 1'); print('1 1'); print('2 1')\n```", ASSERTS, {}, 0.0),
        ("", ASSERTS, {}, 0.0),
        ("def add(:", ASSERTS, {}, 0.0),
    ],
)
def test_completions_are_worth_what_their_tests_say(
    completion: str, tests: Any, options: dict[str, Any], expected: float
) -> None:
    assert code_score(completion, tests, **options) == pytest.approx(expected)


def test_rows_without_tests_and_settings_without_sense_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = {"unsafe_no_isolation": True}
    neither = "each is a text of Python, or each has an input and an output; '3' does not fit"
    for tests, message in (
        (None, "needs tests in column 'tests', and prompt 0 has none"),
        ([3], f"of no known form: .*got '\\[3\\]' \\({neither}"),
        (3, "of no known form: .*got '3'"),
        ("[3]", neither),
        ([{"input": "1", "output": "1"}, "3"], neither),
        ("[" * 100_000, "of no known form: .*they are not Python"),
    ):
        with pytest.raises(DataError, match=message):
            code_score("x = 1", tests, **unsafe)
    with pytest.raises(ConfigError, match=r"reward.code.timeout_s = 4 must be less than reward.timeout_s = 3"):
        build_reward(RewardConfig(name="code", code=unsafe, timeout_s=3.0))
    with pytest.raises(ConfigError, match="did you mean tests_column"):
        build_reward(RewardConfig(name="code", code={"test_column": "x"}))


def test_programs_and_tests_are_found_as_models_and_data_sets_write_them() -> None:
    assert program_of("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "y = 2"
    assert program_of("```python\nx = 1") == "x = 1", "a completion that was cut off"
    assert program_of(" \n") is None
    assert read_tests([["no"]] and '["assert 1"]').assertions == ("assert 1",)
    assert read_tests([{"input": ["1", "2"], "output": 3}]).pairs == (("1\n2", "3"),)
    assert prints_alike("1 \n2\n\n", "1\n2")
    assert not prints_alike("1\n", "1\n2")


class Recorded:
    """A sandbox of a user's own, as Docker or a service elsewhere would be."""

    def __init__(self, limits: ProgramLimits) -> None:
        self.limits = limits

    def run(self, source: str, stdin: str) -> ProgramRun:
        done = subprocess.run(
            [sys.executable, "-c", source], input=stdin, capture_output=True, text=True, timeout=30, check=False
        )
        return ProgramRun(ended="exited", code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def test_a_sandbox_of_ones_own_takes_the_place_of_bubblewrap() -> None:
    own = f"{Path(__file__)}:Recorded"
    assert code_score(RIGHT, ASSERTS, sandbox=own) == 1.0
    assert code_score(ECHO, PAIRS, sandbox=own) == 1.0
    assert code_score(WRONG, ASSERTS, sandbox=own, score="share") == pytest.approx(2 / 3)
