"""Programs that speak for themselves on the socket to the tests, or go for what tests trust, as root and another user.

Real sandboxes, by bubblewrap. Spoofs that need neither are in test_data_spoofs.py.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy
import pytest

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
TESTS = ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]
SCRIPT = """
import json, sys
from offbeat_data._scoring.code.assertions import run_assertions
from offbeat_data._scoring.sandbox.sandbox import BubblewrapSandbox
from offbeat_data._scoring.sandbox.watching import ProgramLimits
found, given = {}, json.load(sys.stdin)
for name, (program, tests) in given["programs"].items():
    limits = ProgramLimits(timeout_s=given["timeout_s"], packages=given["packages"])
    verdict = run_assertions(BubblewrapSandbox(limits, is_tried=True), program, "", tests)
    found[name] = [verdict.held, verdict.refused, verdict.why]
print(json.dumps(found))
"""
Verdicts = dict[str, tuple[list[bool], int, str]]

SPEAKS = """
import json, os, socket, struct
fd = int(os.environ['OFFBEAT_SOCKET'])
def read(size):
    data = b''
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
def asked():
    return json.loads(read(struct.unpack('<Q', read(8))[0]))
def send(message):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    os.write(fd, struct.pack('<Q', len(data)) + data)
KIND = ['class', 0, 'f', [], ['__call__'], False]
def answer(forged, add=['object', 1, KIND]):
    while True:
        if (question := asked())[0] == 'names':
            send(['names', {'add': add}])
        else:
            forged(question) if callable(forged) else send(forged)
"""
"""Functions of a program that answers by itself."""
FORGED = {
    "nested a hundred thousand deep": "answer(b'[\"returned\",' + b'[' * 100000 + b']' * 100000 + b',\"\",[]]')",
    "a length of 2**64 - 1": "answer(lambda question: os.write(fd, b'\\xff' * 8 + b'[]'))",
    "a message without a byte": "answer(b'')",
    "null": "answer(b'null')",
    "a number": "answer(b'3')",
    "a mapping": "answer({'returned': 3})",
    "bytes that are no text": 'answer(b\'["returned", "\\xff\\xfe", "", []]\')',
    "not a number": 'answer(b\'["returned", NaN, "", []]\')',
    "a mapping for a value": "answer(['returned', {'__eq__': True}, '', []])",
    "a kind that is not known": "answer(['returned', ['lambda', 'x: True'], '', []])",
    "a kind that is a list": "answer(['returned', [['list'], 3], '', []])",
    "a hundred answers before a question": (
        "for number in range(100):\n    send(['returned', 90 + number, '', []])\nanswer(['names', {}])"
    ),
    "two answers to each question": "answer(lambda question: [send(['returned', n, '', []]) for n in (0, 1)])",
    "names as an answer": "answer(['names', {'add': 3}])",
    "the module that judges as the function": (
        "answer(['returned', 3, '', []], ['module', 'offbeat_data._scoring.sandbox.inside_tests'])"
    ),
    "a module of the machine as a result": "answer(['returned', ['module', 'os'], '', []])",
    "a class of Python's as the function": "answer(['returned', 3, '', []], ['builtin', 'bool'])",
    "an object of a class of Python's": "answer(['returned', ['object', 2, ['builtin', 'int']], '', []])",
    "an object of a class that derives from int": (
        "kind = ['class', 3, 'Y', [['builtin', 'int']], ['plain', '__eq__'], True]\n"
        "answer(['returned', ['object', 2, kind], '', []])"
    ),
    "a class whose base is a function": (
        "answer(['returned', ['object', 2, ['class', 3, 'Y', [['back', 0]], [], False]], '', []])"
    ),
    "special methods that are not offered": (
        "names = ['__eq__', '__ne__', '__radd__', '__instancecheck__', '__class__', '__hash__', '__call__']\n"
        "kind = ['class', 3, 'Y', [], names, False]\n"
        "answer(lambda q: send(['returned', ['object', 2, kind] if q[1] == 1 else True, '', []]))"
    ),
    "plain data that is an object again": (
        "kind = ['class', 3, 'Y', [['builtin', 'int']], ['plain'], False]\n"
        "answer(['returned', ['object', 2, kind], '', []])"
    ),
    "a named tuple with an __eq__": "answer(['returned', ['namedtuple', 'P', ['__eq__'], [3]], '', []])",
    "an array of objects": "answer(['returned', ['ndarray', '|O', [1], ['list', [['object', 2, KIND]]]], '', []])",
    "an array of true": "answer(['returned', ['ndarray', '|b1', [1], ['list', [True]]], '', []])",
    "an exception that is a number": ("answer(['raised', [['builtin', 'int'], '3', ['tuple', [3]], 4], '', []])"),
    "an exception that ends tests": ("answer(['raised', [['builtin', 'SystemExit'], '0', ['tuple', [0]], 4], '', []])"),
    "arguments changed that are numbers": "answer(['returned', 0, '', [[0, 3], [1, 10]]])",
    "arguments changed that are not there": "answer(['returned', 0, '', [[7, ['list', []]], ['a', 3]]])",
    "a function of the tests that was not passed": "answer(lambda question: send(['back', 0, [3]]))",
    "a function of the tests as a result": "answer(['returned', ['back', -1], '', []])",
    "a verdict as what was printed": "answer(['returned', 0, '\\n[0, 1, \"\"] 00\\n[1, 1, \"\"] 00\\n', []])",
    "descriptors with the answer": (
        "end = socket.socket(fileno=os.dup(fd))\n"
        "def forged(question):\n    data = json.dumps(['returned', 0, '', []]).encode()\n"
        "    socket.send_fds(end, [struct.pack('<Q', len(data)) + data], [0, 1, 2])\nanswer(forged)"
    ),
    "a socket that does not wait": "os.set_blocking(fd, False)\nanswer(['returned', 0, '', []])",
    "a socket that is shut down": (
        "end = socket.socket(fileno=os.dup(fd))\nanswer(lambda question: end.shutdown(socket.SHUT_RDWR))"
    ),
    "a child that answers": ("if not os.fork():\n    answer(['returned', 0, '', []])\nos.close(fd)\nos.wait()"),
    "another program that answers": (
        "import sys\nwords = [sys.executable, '-I', '-S', '-c', 'import os; print(os.read(%d, 99))' % fd]\n"
        "os.set_inheritable(fd, True)\nos.execv(words[0], words)"
    ),
}
"""What is sent in place of an answer."""


@pytest.fixture(scope="module")
def verdicts(run_as_user: Callable[[str, Any], Any]) -> Callable[..., Verdicts]:
    def judge(programs: dict[str, tuple[str, list[str]]], timeout_s: float = 50.0, packages: Any = ()) -> Verdicts:
        given = {"programs": programs, "timeout_s": timeout_s, "packages": list(packages)}
        found: Verdicts = run_as_user(SCRIPT, given)
        return found

    return judge


def test_what_a_program_says_in_place_of_an_answer_earns_nothing(verdicts: Callable[..., Verdicts]) -> None:
    right = SPEAKS + "answer(lambda question: send(['returned', sum(question[2]), '', []]))"
    programs = {name: (SPEAKS + forged, TESTS) for name, forged in FORGED.items()}
    found = verdicts({"right": (right, TESTS), **programs})
    assert found.pop("right")[0] == [True, True], "a program that speaks for itself and is right"
    assert {name: held for name, (held, *_) in found.items() if any(held)} == {}


LIES = {
    "a repr that lies": "class Y:\n    __repr__ = __str__ = lambda self: '3'\ndef add(a, b): return Y()",
    "a class that is equal to everything": (
        "class M(type):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "class Y(metaclass=M): pass\ndef add(a, b): return Y"
    ),
    "not a number": "def add(a, b): return float('nan')",
    "a decimal that signals": "from decimal import Decimal\ndef add(a, b): return Decimal('sNaN')",
    "a list in itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a list of a hundred thousand lists": (
        "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x"
    ),
    "a number of ten million digits": "def add(a, b): return 1 << 40000000",
    "an integer whose digits lie": (
        "class Y(int):\n    __int__ = __index__ = __float__ = lambda self: 3\n    __str__ = lambda self: '3'\n"
        "def add(a, b): return Y(0)"
    ),
    "a text of the class of errors": "class Refused(AssertionError): pass\ndef add(a, b): raise Refused(3)",
    "an error that is equal to everything": (
        "class E(Exception):\n    def __eq__(self, other): return True\ndef add(a, b): return E(3)"
    ),
    "the end of a generator": "def add(a, b): raise StopIteration(3)",
    "an interrupt": "def add(a, b): raise KeyboardInterrupt",
    "a status": "import os\ndef add(a, b): os._exit(0)",
    "a status before it is asked": "import sys\nsys.exit(0)",
    "kills all that it sees": "import os\ndef add(a, b):\n    os.kill(-1, 9)\n    return 0",
    "signals to all numbers": (
        "import os, signal\ndef add(a, b):\n    for pid in range(1, 400):\n        try:\n"
        "            os.kill(pid, signal.SIGINT if pid != os.getpid() else 0)\n        except OSError:\n"
        "            pass\n    return 0"
    ),
    "closes its descriptors": "import os\ndef add(a, b):\n    os.closerange(0, 64)\n    return 3",
    "a trace of its frames": (
        "import sys\ndef see(frame, event, arg):\n    for name in list(frame.f_locals):\n"
        "        if 'message' in name or 'outcome' in name: frame.f_locals[name] = ['returned', 3]\n    return see\n"
        "def add(a, b):\n    sys.settrace(see)\n    return 0"
    ),
    "an audit hook": "import sys\nsys.addaudithook(lambda *a: None)\ndef add(a, b): return 0",
    "its own copy of the tests' module": (
        "import sys, types\nfake = types.ModuleType('test')\nfake._holds = lambda *a: True\n"
        "sys.modules['offbeat_data._scoring.sandbox.inside_tests'] = fake\ndef add(a, b): return 0"
    ),
    "a thread that answers after the answer": (
        "import os, struct, threading\nfd = int(os.environ['OFFBEAT_SOCKET'])\nlie = b'[\"returned\", 0, \"\", []]'\n"
        "def later():\n    while True: os.write(fd, struct.pack('<Q', len(lie)) + lie)\n"
        "def add(a, b):\n    threading.Thread(target=later, daemon=True).start()\n    return 0"
    ),
    "a finalizer": (
        "import os\nclass Y:\n    def __del__(self): os.write(1, b'[0, 1, \"\"]')\n"
        "def add(a, b):\n    Y()\n    return 0"
    ),
}
"""Programs that return or do what could be taken for an answer."""


def test_what_could_be_taken_for_an_answer_earns_nothing(verdicts: Callable[..., Verdicts]) -> None:
    found = verdicts({name: (lie, TESTS) for name, lie in LIES.items()})
    assert {name: held for name, (held, *_) in found.items() if any(held)} == {}


READS_NAMES = """
import sys
server, words = sys.modules['offbeat_data._scoring.sandbox.inside_program'].Server, []
real = server._names
def names(self, asked):
    words.extend(word for word in asked if word not in ('f', 'g', 'assert', 'eval', 'import', 'solution', 'from'))
    return real(self, asked)
server._names = names
def f(x): return words[x]
g = f
"""
SWALLOWS = {
    "the names that tests use": (READS_NAMES, ["assert f(0) == 'apple'  # not pear", "assert g(1) == 'plum'"]),
    "assertions in its block": (
        "class opened:\n    value = 0\n    def __enter__(self): return self\n"
        "    def __exit__(self, *error): return True",
        ["with opened() as found:\n    assert found.value == 3"],
    ),
    "assertions that it is to call": (
        "def each(see, values):\n    try:\n        see(0)\n    except BaseException:\n        pass",
        ["def see(x):\n    assert x == 4\neach(see, [4])"],
    ),
    "how numpy compares": (
        "class Y:\n    def __array_function__(self, *a): return True\n    def __array_ufunc__(self, *a): return True\n"
        "def f(x): return Y()",
        ["import numpy\nassert numpy.allclose(f(2), 1.41421)", "import numpy\nassert numpy.isclose(f(2), 1.41421)"],
    ),
    "when loops end": (
        "def f(x): raise StopIteration",
        ["assert all(map(lambda x: f(x) == x * x, [1, 2]))", "for got, x in zip(map(f, [2]), [4]): assert got == x"],
    ),
    "when loops end, by an attribute": (
        "class Y:\n    @property\n    def value(self): raise type('Own', (StopIteration,), {})\ny = Y()",
        ["assert all(map(lambda y: y.value == 3, [y]))"],
    ),
    "what is in it": (
        "class Y:\n    def __contains__(self, other): return True\ndef f(x): return Y()",
        ["assert 4 in f(2)"],
    ),
}
"""Programs that learn what is expected, or decide what holds, with tests of their own."""


ITERATORS = (
    "class Up:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n"
    "    def __next__(self):\n        if not self.n: raise StopIteration\n        self.n -= 1\n        return self.n\n"
    "def down(n): yield from range(n)\ndef first(values): return next(iter(values))",
    [
        "assert list(Up(3)) == [2, 1, 0] and list(zip(Up(2), down(5))) == [(1, 0), (0, 1)]",
        "found = down(1)\nassert next(found) == 0 and next(found, 7) == 7",
        "try:\n    Up(0).__next__()\n    assert False\nexcept StopIteration:\n    pass",
        "try:\n    first([])\n    assert False\nexcept StopIteration:\n    pass",
    ],
)
"""A program whose loops end as they should, with tests that see it."""


def test_a_program_neither_learns_what_is_expected_nor_decides_what_holds(verdicts: Callable[..., Verdicts]) -> None:
    packages = [os.path.dirname(os.path.dirname(numpy.__file__))]
    right = ("def f(x): return x ** 0.5", ["import numpy\nassert numpy.allclose(f(2), 1.41421)"])
    found = verdicts({"right": right, "iterators": ITERATORS, **SWALLOWS}, packages=packages)
    assert found.pop("right")[0] == [True]
    assert found.pop("iterators")[0] == [True] * 4
    assert {name: held for name, (held, *_) in found.items() if any(held)} == {}
    assert found["what is in it"][1] == 1, "refused, as the program would decide"
