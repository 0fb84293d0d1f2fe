"""Programs that solve nothing and would have assertions hold all the same. Real sandboxes, by bubblewrap."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from offbeat_data import ProgramRun, Prompt, RewardConfig
from offbeat_data._scoring.code.assertions import run_assertions
from offbeat_data._scoring.code.code import CodeScorer, code_scorer
from offbeat_data._scoring.functions import CompletionText
from offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox
from offbeat_data._scoring.sandbox.watching import ProgramLimits

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
TESTS = ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]
VERDICT = 'b\'\\n{"held": [1, 1], "refused": 0, "why": ""}\\n\''
SPOOFS = {
    "reads the tests from every descriptor and prints what holds": (
        "import os\nfor fd in range(64):\n    try:\n        print(os.pread(fd, 1 << 20, 0))\n"
        "    except OSError:\n        pass\n"
        f"    try:\n        os.write(fd, {VERDICT})\n    except OSError:\n        pass\n"
        "def add(a, b):\n    os._exit(0)"
    ),
    "patches json": (
        "import json\ndef load(*a, **k): return {'setup': '', 'tests': ['pass'] * 2, 'key': '00'}\n"
        'json.load = json.loads = load\njson.dumps = lambda *a: \'["returned", 3, "", []]\'\ndef add(a, b): return 3'
    ),
    "is equal to everything": "class Y:\n    def __eq__(self, other): return True\ndef add(a, b): return Y()",
    "is a number that is equal to everything": (
        "class Y(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Y(4)"
    ),
    "lies about its class": (
        "class Y:\n    __class__ = property(lambda self: int)\n    def __eq__(self, other): return True\n"
        "class add:\n    def __new__(cls, a, b): return Y()"
    ),
    "returns what the standard library has equal to everything": (
        "from unittest import mock\nadd = lambda a, b: mock.ANY\nadd.__module__ = 'unittest.mock'"
    ),
    "walks the frames of its callers": (
        "import sys\ndef add(a, b):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        found += [frame.f_globals, frame.f_locals]\n        frame = frame.f_back\n"
        "    for space in found:\n        for name in list(space):\n            if 'test' in name or 'held' in name:\n"
        "                space[name] = ['pass', 'pass']\n    return 0"
    ),
    "patches builtins": (
        "import builtins\nreal = builtins.compile\n"
        "builtins.compile = lambda s, *a, **k: real('pass' if 'test' in str(a[:1]) else s, *a, **k)\n"
        "builtins.AssertionError = type('E', (), {})\ndef add(a, b): return 0"
    ),
    "patches modules": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if 'offbeat' in name:\n"
        "        module.encode = lambda *a, **k: 3\n        module.NotPlain = module.Link = object\n"
        "sys.modules['solution'].add = add = lambda a, b: 0"
    ),
    "looks for the tests in memory": (
        "import gc, sys\ndef add(a, b):\n    for each in gc.get_objects():\n"
        "        if isinstance(each, (list, dict)):\n"
        "            if any(isinstance(x, str) and x.startswith('assert add') for x in list(each)):\n"
        "                return int(str(each).split('== ')[1][0])\n    return 0"
    ),
    "prints at its end": (
        f"import atexit, os\natexit.register(lambda: os.write(1, {VERDICT}))\ndef add(a, b): raise SystemExit(0)"
    ),
    "prints on an alarm": (
        f"import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os.write(1, {VERDICT}))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)\nimport time\ndef add(a, b): time.sleep(0.3); return 0"
    ),
    "prints from a thread": (
        f"import os, threading, time\ndef later():\n    while True:\n        os.write(1, {VERDICT})\n"
        "        time.sleep(0.01)\nthreading.Thread(target=later, daemon=True).start()\ndef add(a, b): return 0"
    ),
    "patches pickle": (
        "import pickle, copyreg\npickle.loads = pickle.load = lambda *a, **k: 3\n"
        "class Y:\n    def __reduce__(self): return (int, (3,))\ndef add(a, b): return Y()"
    ),
    # Of one process, this makes the 10 of the tests a 4. To write 3 into its own 4 would just be to return 3.
    "writes over numbers by ctypes": (
        "import ctypes\ndef add(a, b):\n    ctypes.memmove(id(10) + 24, id(4) + 24, 4)\n    return 4"
    ),
    "writes into /proc": (
        "import os\nfor pid in [p for p in os.listdir('/proc') if p.isdigit()] + ['self']:\n"
        "    for path in [f'/proc/{pid}/mem', *(f'/proc/{pid}/fd/{n}' for n in range(32))]:\n        try:\n"
        f"            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)\n            os.write(fd, {VERDICT})\n"
        "        except OSError:\n            pass\ndef add(a, b): return 0"
    ),
    "forks and prints": (
        f"import os\nif os.fork():\n    os.write(1, {VERDICT})\n    os._exit(0)\ndef add(a, b): return 0"
    ),
    "answers by itself": (
        "import json, os, struct\nfd = int(os.environ['OFFBEAT_SOCKET'])\n"
        "kind = ['class', 0, 'int', [['builtin', 'int']], ['plain', '__eq__', '__call__', '__hash__'], False]\n"
        "while head := os.read(fd, 8):\n    asked = json.loads(os.read(fd, struct.unpack('<Q', head)[0]))\n"
        "    found = {'add': ['object', 1, kind], '__builtins__': {}, 'assert': 1, 'abs': ['object', 1, kind]}\n"
        "    answer = ['names', found] if asked[0] == 'names' else ['returned', ['object', 2, kind], '', []]\n"
        "    data = json.dumps(answer).encode()\n    os.write(fd, struct.pack('<Q', len(data)) + data)"
    ),
    "raises what ends tests": "def add(a, b): raise SystemExit(0)",
}


def share_of_tests(scorer: CodeScorer, program: str, tests: list[str]) -> float | None:
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="", fields={"tests": tests})
    [found] = scorer.score(prompt, [CompletionText(text=f"```python\n{program}\n```")])
    return found.value


@pytest.fixture(scope="module")
def scorer() -> CodeScorer:
    return code_scorer(RewardConfig(name="code", code={"timeout_s": 50.0, "score": "share"}, timeout_s=60.0))


@needs_bubblewrap
@pytest.mark.parametrize("spoof", SPOOFS)
def test_a_program_that_solves_nothing_earns_nothing(spoof: str, scorer: CodeScorer) -> None:
    assert share_of_tests(scorer, SPOOFS[spoof], TESTS) == 0.0, "the share of tests that hold"


@needs_bubblewrap
def test_the_same_tests_pay_the_program_that_solves_them(scorer: CodeScorer) -> None:
    assert share_of_tests(scorer, "def add(a, b): return a + b", TESTS) == 1.0


LENIENT = {
    "abs": "def abs(x): return 0",
    "isclose": "def isclose(*a, **k): return True",
    "math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    fabs = lambda x: 0",
    "round": "def round(x, n=0): return 1.414",
    "objects": "class A:\n    def __sub__(self, x): return self\n    def __abs__(self): return 0.0\n"
    "    def __float__(self): return float('nan')\n    def __round__(self, n=0): return 1.414\ndef f(x): return A()",
}


@needs_bubblewrap
@pytest.mark.parametrize("name", LENIENT)
def test_a_program_does_not_bring_what_tests_judge_with(name: str, scorer: CodeScorer) -> None:
    tests = [
        "assert abs(f(2) - 1.41421) < 1e-3",
        "assert isclose(f(2), 1.41421, rel_tol=1e-3)",
        "assert math.isclose(f(2), 1.41421, rel_tol=1e-3)",
        "assert math.fabs(f(2) - 1.41421) < 1e-3",
        "assert round(f(2), 3) == 1.414",
    ]
    imports = "import math\nfrom math import isclose\n"
    assert share_of_tests(scorer, f"{imports}def f(x): return 7.0\n{LENIENT[name]}", tests) == 0.0
    if name == "math":
        assert share_of_tests(scorer, f"{imports}def f(x): return x ** 0.5\nfrom math import fabs", tests) == 1.0


class OtherUser:
    """A sandbox with `run` alone, such as one of Docker: another user than root, and pipes."""

    def run(self, source: str, stdin: str) -> ProgramRun:
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-I", "-c", source]
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=120, check=False, cwd="/tmp")
        return ProgramRun(ended="exited", code=done.returncode, stdout=done.stdout, stderr=done.stderr)


LOOKS_AROUND = (
    "import os\nfor pid in (os.getppid(), os.getpid()):\n    for fd in range(8):\n"
    "        for flags in (os.O_RDONLY, os.O_WRONLY):\n            try:\n"
    "                fd_of = os.open(f'/proc/{pid}/fd/{fd}', flags | os.O_NONBLOCK)\n"
    f"                os.read(fd_of, 1 << 20) if flags == os.O_RDONLY else os.write(fd_of, {VERDICT})\n"
    "                FOUND\n            except OSError:\n                pass\n"
    "try:\n    open(f'/proc/{os.getppid()}/mem', 'rb')\n    memory = 1\nexcept OSError:\n    memory = 0\n"
    "def add(a, b): return 99 if memory else 0"
)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not os.path.exists("/usr/bin/python3"),
    reason="only root becomes another user",
)
def test_in_one_sandbox_a_program_cannot_look_into_the_process_with_the_tests() -> None:
    sandbox = OtherUser()
    assert run_assertions(sandbox, "def add(a, b): return a + b", "", TESTS).held == [True, True]
    assert run_assertions(
        sandbox, LOOKS_AROUND.replace("FOUND", "pass"), "", [*TESTS, "assert add(1, 1) == 0"]
    ).held == [*(False, False, True)]
    for name in ("is equal to everything", "prints from a thread", "forks and prints", "patches json"):
        assert run_assertions(sandbox, SPOOFS[name], "", ["assert add(1, 2) == 4"]).held == [False], name


class Noisy:
    """A sandbox of one's own in which others print, too."""

    def run(self, source: str, stdin: str) -> ProgramRun:
        words = [sys.executable, "-I", "-c", source]
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        noise = '[0, 1, ""] \n[1, 1, ""] 00\né\n' + "".join(f'[{number}, 1, ""] {"0" * 128}\n' for number in (0, 1))
        return ProgramRun(ended="exited", code=0, stdout=noise + done.stdout + noise, stderr=done.stderr)


def test_results_that_others_print_do_not_count() -> None:
    assert run_assertions(Noisy(), "def add(a, b): return a + b", "", TESTS).held == [True, True]
    assert run_assertions(Noisy(), "def add(a, b): return a * b", "", TESTS).held == [False, False]
    assert run_assertions(Noisy(), "raise SystemExit(0)", "", TESTS).held == [False, False]


@needs_bubblewrap
def test_what_a_program_says_is_bounded() -> None:
    """A judge holds so much of it in memory, and no more."""
    sandbox = BubblewrapSandbox(ProgramLimits(timeout_s=50.0), is_tried=True)
    program = "def f(n): return 'x' * n"
    assert run_assertions(sandbox, program, "", ["assert len(f(1 << 23)) == 1 << 23"]).held == [True]
    verdict = run_assertions(sandbox, program, "", ["assert f(1 << 25)"])
    assert (verdict.held, verdict.refused) == ([False], 1)
    assert "it is larger than 16777216 bytes" in verdict.why
    flood = (
        "import os\nfd = int(os.environ['OFFBEAT_SOCKET'])\nos.write(fd, b'\\xff' * 8)\n"
        "while True:\n    os.write(fd, b'x' * 65536)"
    )
    assert run_assertions(sandbox, flood, "", ["assert True"]).held == [False]
