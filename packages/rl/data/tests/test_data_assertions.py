"""Assertions on a program: forms of tests as data sets have them, each with a right and a wrong program.

MBPP, HumanEval, LiveCodeBench, APPS and what is written after them. Real sandboxes, by bubblewrap.
"""

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from offbeat_core import DataError
from offbeat_data import Prompt, RewardConfig, build_reward
from offbeat_data._scoring.code.tests import names_used, read_tests

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")
Score = Callable[..., dict[str, float]]


@pytest.fixture(scope="module")
def score() -> Score:
    """Scores a program: all numbers of the reward."""
    code = {"setup_column": "setup", "timeout_s": 50.0}
    rewards = {"": build_reward(RewardConfig(name="code", code=code, timeout_s=60.0))}

    def ask(program: str, tests: Any, **fields: Any) -> dict[str, float]:
        column = "entry_point" if "entry_point" in fields else ""
        if column not in rewards:
            rewards[column] = build_reward(
                RewardConfig(name="code", code={**code, "entry_column": column}, timeout_s=60.0)
            )
        prompt = Prompt(index=0, ids=np.array([1], np.int32), text="Write it.", fields={"tests": tests, **fields})
        return rewards[column].score(prompt, f"```python\n{program}\n```").parts

    return ask


CHECK = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
STACK = (
    "class Stack:\n    size = 0\n    def __init__(self, limit=9):\n        self.items, self.limit = [], limit\n"
    "    def push(self, x):\n        if len(self.items) >= self.limit:\n            raise OverflowError('full')\n"
    "        self.items.append(x)\n        return self\n    def pop(self):\n        return self.items.pop()\n"
    "    def __len__(self):\n        return len(self.items)\n    def __iter__(self):\n        return iter(self.items)\n"
)
TREE = "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
DEPTH = TREE + "def depth(root):\n    return 0 if root is None else 1 + max(depth(root.left), depth(root.right))\n"
FORMS: dict[str, tuple[Any, str, str]] = {
    "values": (["assert f(3) == 9", "assert f(-2) == 4"], "def f(x): return x * x", "def f(x): return x * 3"),
    "several statements": (["x = f(2)\ny = f(3)\nassert x + y == 5"], "def f(x): return x", "def f(x): return 1"),
    "check(candidate)": (CHECK + "check(total)", "total = sum", "def total(x): return len(x)"),
    "floats": (
        ["import math\nassert math.isclose(f(2), 1.41421356, rel_tol=1e-6)"],
        "def f(x): return x ** 0.5",
        "def f(x): return x / 2",
    ),
    "floats, by what the program imports": (
        ["assert isclose(f(2), 1.41421356, rel_tol=1e-6)", "assert math.floor(f(9)) == 3"],
        "import math\nfrom math import isclose\ndef f(x): return math.sqrt(x)",
        "import math\nfrom math import isclose\ndef f(x): return x / 2",
    ),
    "differences": (["assert abs(f(2) - 1.41421) < 1e-4"], "def f(x): return x ** 0.5", "def f(x): return 1.5"),
    "rounded": (["assert round(f(10), 2) == 3.33"], "def f(x): return x / 3", "def f(x): return x / 4"),
    "tuples": (["assert f('a,b') == ('a', 'b')"], "def f(x): return tuple(x.split(','))", "def f(x): return x.split()"),
    "a list is no tuple": (["assert f(1) == (1, 2)"], "def f(x): return (1, 2)", "def f(x): return [1, 2]"),
    "sets": (["assert f([1, 1, 2]) == {1, 2}"], "f = set", "f = list"),
    "dictionaries": (
        ["assert f('aab') == {'a': 2, 'b': 1}"],
        "from collections import Counter\ndef f(x): return Counter(x)",
        "def f(x): return dict.fromkeys(x, 1)",
    ),
    "nested": (["assert f(2) == [[1], {'a': (None, True)}]"], "def f(x): return [[1], {'a': (None, True)}]", "f = int"),
    "large numbers": (
        ["import math\nassert f(2000) == math.factorial(2000)"],
        "from math import factorial as f",
        "def f(n): return 0",
    ),
    "bytes, complex, fractions, days": (
        [
            "from fractions import Fraction\nfrom datetime import date\n"
            "assert f() == (b'x', 1j, Fraction(1, 3), date(2024, 2, 29))"
        ],
        "from fractions import Fraction\nfrom datetime import date, timedelta\n"
        "def f(): return (b'x', 1j, Fraction(2, 6), date(2024, 2, 28) + timedelta(1))",
        "def f(): return (b'x', 1j, 1 / 3, '2024-02-29')",
    ),
    "truth": (["assert f(7)", "assert not f(8)", "assert f(2) is True"], "def f(x): return x in (2, 7)", "f = bool"),
    "none": (["assert f(1) is None", "assert f(2) == None"], "def f(x): pass", "def f(x): return 0"),
    "expected exceptions": (
        ["try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'negative' in str(error)"],
        "def f(x):\n    if x < 0:\n        raise ValueError('negative')",
        "def f(x):\n    raise TypeError('negative')",
    ),
    "exceptions of the program": (
        ["try:\n    f(3)\nexcept Late as error:\n    assert error.by == 3 and error.args == (3,)\nelse:\n    assert 0"],
        "class Late(ValueError):\n    def __init__(self, by):\n        super().__init__(by)\n        self.by = by\n"
        "def f(x): raise Late(x)",
        "class Late(ValueError): pass\ndef f(x): raise ValueError(x)",
    ),
    "arguments by name": (["assert f(b=1, a=[5]) == [5, 1]"], "def f(a, b): return a + [b]", "def f(b, a): return b"),
    "changed in place": (
        [
            "x = [3, 1, 2]\nassert f(x) is None\nassert x == [1, 2, 3]",
            "y = {'a': 1}\ng(y)\nassert y == {'a': 1, 'b': 2}",
        ],
        "def f(x): x.sort()\ndef g(y): y['b'] = 2",
        "def f(x): return None\ndef g(y): y = {}",
    ),
    "functions of the test": (
        ["assert f(lambda x: x * 2, [1, 2]) == [2, 4]", "assert f(len, ['ab']) == [2]"],
        "def f(g, xs): return [g(x) for x in xs]",
        "def f(g, xs): return xs",
    ),
    "functions that are returned": (
        ["add = f(2)\nassert add(3) == 5"],
        "def f(x): return lambda y: x + y",
        "def f(x): return lambda y: x * y * 2",
    ),
    "generators": (
        ["assert list(f(3)) == [0, 1, 2]", "g = f(9)\nassert next(g) == 0 and next(g) == 1", "assert 2 in f(3)"],
        "def f(n):\n    yield from range(n)",
        "def f(n):\n    yield n",
    ),
    "ranges, maps and views": (
        ["assert f(3) == range(3)", "assert list(g([1, 2])) == ['1', '2']", "assert set({1: 2}) == set(h({1: 2}))"],
        "f = range\ndef g(x): return map(str, x)\ndef h(x): return x.keys()",
        "f = list\ndef g(x): return x\ndef h(x): return x.values()",
    ),
    "a class": (
        [
            "s = Stack()\nassert len(s) == 0\ns.push(1).push(2)\nassert s.pop() == 2 and list(s) == [1]",
            "s = Stack(limit=0)\ntry:\n    s.push(1)\nexcept OverflowError:\n    pass\nelse:\n    assert False",
            "s = Stack()\ns.limit = 5\nassert s.limit == 5 and s.size == 0 and Stack.size == 0",
            "assert isinstance(Stack(), Stack) and type(Stack()).__name__ == 'Stack' and hasattr(Stack(), 'push')",
        ],
        STACK,
        STACK.replace("self.items.pop()", "self.items.pop(0)"),
    ),
    "derived classes": (
        [
            "assert isinstance(Dog(), Animal) and issubclass(Dog, Animal)",
            "assert Dog().say() == 'woof' and str(Dog()) == 'd'",
        ],
        "class Animal:\n    def __str__(self): return 'd'\nclass Dog(Animal):\n    def say(self): return 'woof'",
        "class Animal:\n    def __str__(self): return 'd'\nclass Dog:\n    def say(self): return 'woof'",
    ),
    "a subclass of list": (
        ["s = Bag()\ns.put(1)\ns.append(2)\nassert s == [1, 2] and len(s) == 2 and s[0] == 1"],
        "class Bag(list):\n    def put(self, x): self.append(x)",
        "class Bag(list):\n    def put(self, x): pass",
    ),
    "named tuples": (
        ["p = f(1, 2)\nassert p == (1, 2) and p.x == 1"],
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a, b): return P(a, b)",
        "def f(a, b): return (a, b)",
    ),
    "enumerations by value": (
        ["assert f() == 2", "assert Level.HIGH.name == 'HIGH'"],
        "from enum import Enum, IntEnum\nclass Kind(IntEnum):\n    B = 2\nclass Level(Enum):\n    HIGH = 1\n"
        "def f(): return Kind.B",
        "from enum import Enum\nclass Level(Enum):\n    HIGH = 1\ndef f(): return Level.HIGH",
    ),
    "coroutines": (
        ["import asyncio\nassert asyncio.run(f(2)) == 4"],
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * 2",
        "async def f(x): return x",
    ),
    "what is printed": (
        [
            "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f()\n"
            "assert b.getvalue() == 'hi\\n'"
        ],
        "def f(): print('hi')",
        "def f(): print('ho')",
    ),
    "a name of Python's own": (["assert sum(10, 15) == 6"], "def sum(a, b): return 6", "def sum(a, b): return 25"),
    "import of the solution": (
        ["from solution import f\nimport solution\nassert f(1) == 2 and solution.f(2) == 3"],
        "def f(x): return x + 1",
        "def f(x): return x",
    ),
    "found by eval": (["assert eval('f(1)') == 2 and globals()['f'](2) == 3"], "def f(x): return x + 1", "f = int"),
    "JSON text": (json.dumps(["assert f(1) == 2"]), "def f(x): return x + 1", "def f(x): return x"),
    "fn_name (APPS)": (
        {"fn_name": "f", "inputs": [[1, [2]], [3, []]], "outputs": [[1, 2], [[3]]]},
        "def f(a, b): return (a, *b)",
        "def f(a, b): return b",
    ),
    "fn_name, a class": (
        {"fn_name": "f", "inputs": [[1]], "outputs": [2]},
        "class Solution:\n    def f(self, x): return x + 1",
        "class Solution:\n    def f(self, x): return x",
    ),
}


@needs_bubblewrap
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_tests_find_the_right_and_the_wrong_program(form: str, score: Score) -> None:
    tests, right, wrong = FORMS[form]
    assert score(right, tests) == {"code": 1.0, "code/no_program": 0.0, "code/refused": 0.0}
    assert score(wrong, tests)["code"] == 0.0


@needs_bubblewrap
def test_setup_runs_before_the_tests_and_may_use_the_program(score: Score) -> None:
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\nexpected = 3"
    assert score(DEPTH, ["assert depth(root) == expected"], setup=setup)["code"] == 1.0
    assert score(DEPTH.replace("1 + max", "max"), ["assert depth(root) == expected"], setup=setup)["code"] == 0.0
    assert score(DEPTH, ["assert True"], setup="raise ValueError")["code"] == 0.0


@needs_bubblewrap
def test_check_is_called_with_the_function_that_a_column_names(score: Score) -> None:
    assert score("def total(x): return sum(x)", CHECK, entry_point="total")["code"] == 1.0
    assert score("def total(x): return 3", CHECK, entry_point="total")["code"] == 0.0
    functional = [{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}]
    program = "class Solution:\n    def join(self, a: list[int], b: int) -> list[int]: return a + [b]"
    assert score(program, functional, entry_point="join")["code"] == 1.0
    assert score(program.replace("[b]", "[0]"), functional, entry_point="join")["code"] == 0.0


REFUSED = {
    "objects compared": ("assert f() == f()", "class A: pass\ndef f(): return A()"),
    "objects ordered": ("assert f() < 3", "class A:\n    def __lt__(self, other): return True\ndef f(): return A()"),
    "objects subtracted": (
        "assert abs(f() - 3) < 1",
        "class A:\n    def __sub__(self, other): return 0\ndef f(): return A()",
    ),
    "objects in sets": ("assert len({f(), f()}) == 1", "class A: pass\ndef f(): return A()"),
    "objects of the test": ("class B: pass\nassert f(B()) == 1", "def f(x): return 1"),
    "input replaced": (
        "import builtins\nbuiltins.input = lambda: '3'\nassert f() == 3",
        "def f(): return int(input())",
    ),
    "membership": ("assert 3 in f()", "class A:\n    def __contains__(self, x): return True\ndef f(): return A()"),
    "a class derived": ("class B(A): pass\nassert B().f() == 1", "class A:\n    def f(self): return 1"),
    "what holds itself": ("assert f()[0] is not None", "def f():\n    x = []\n    x.append(x)\n    return x"),
    "caught": ("try:\n    f() == 3\nexcept BaseException:\n    pass", "class A: pass\ndef f(): return A()"),
}


@needs_bubblewrap
@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_asked_of_a_program_is_refused_and_counted(
    form: str, score: Score, caplog: pytest.LogCaptureFixture
) -> None:
    test, program = REFUSED[form]
    assert score(program, [test, "assert True"]) == {"code": 0.0, "code/no_program": 0.0, "code/refused": 0.5}


@needs_bubblewrap
def test_the_first_refusal_is_told(caplog: pytest.LogCaptureFixture) -> None:
    reward = build_reward(RewardConfig(name="code"))
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="", fields={"tests": ["assert f() == 3"]})
    for _ in range(2):
        reward.score(prompt, "class A: pass\ndef f(): return A()")
    [message] = [record.getMessage() for record in caplog.records if "reward code" in record.getMessage()]
    assert "a test compares or combines (__eq__) an object of the program, of class A" in message
    assert "docs/rewards.md" in message


@needs_bubblewrap
def test_a_refusal_commands_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="", fields={"tests": ["assert f() == 3"]})
    program = "A = type('\\x1b]0;owned\\x07', (), {})\ndef f(): return A()"
    build_reward(RewardConfig(name="code")).score(prompt, f"```python\n{program}\n```")
    [message] = [record.getMessage() for record in caplog.records if "reward code" in record.getMessage()]
    assert r"of class \x1b]0;owned\x07" in message


@needs_bubblewrap
def test_assertions_count_up_to_the_one_that_takes_too_long() -> None:
    reward = build_reward(RewardConfig(name="code", code={"score": "share", "timeout_s": 20.0}, timeout_s=60.0))
    tests = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 6", "assert f(1) == 2"]
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="", fields={"tests": tests})
    program = "def f(x):\n    while x == 3: pass\n    return 2 * x"
    assert reward.score(prompt, program).value == 0.5


@needs_bubblewrap
def test_a_program_that_uses_too_much_earns_nothing(score: Score) -> None:
    program = "import os\ndef f(x):\n    for at in range(17000 * x): os.symlink('x', f'/tmp/{at}')\n    return 3"
    assert score(program, ["assert f(0) == 3"])["code"] == 1.0
    assert score(program, ["assert f(1) == 3"])["code"] == 0.0


def test_names_that_a_program_is_told_are_those_of_code() -> None:
    for text, names in (
        ("assert f(3) == 'apple'  # pear", ["f"]),
        ("from solution import f\nimport solution as s\nassert s.g(f.x) == 'apple'", ["f", "g", "s"]),
        ("assert eval('f(1)') == 'apple' and globals()['g'](2) == 'pear'", ["eval", "f", "g", "globals"]),
        ("x = 1\nassert eval(f'f({x})') == 'apple'", ["eval", "f", "x"]),
        ("assert 'f' in globals() and globals().get('g')(1) == 'apple'", ["f", "g", "globals"]),
        ("assert vars(f(1)) == {'apple': 'pear'}", ["f", "vars"]),
        ("assert f(1) ==", []),
    ):
        assert names_used([text]) == names, text


def test_tests_that_no_program_can_fail_are_refused() -> None:
    for text, message in (
        (CHECK, "check is defined and not called: .* reward.code.entry_column"),
        ("def test_add():\n    assert add(1) == 2\n", "they call nothing and assert nothing"),
        ('"""Tests."""\nimport unittest\nif __name__ == "__main__":\n    unittest.main()', "they call nothing"),
        ("assert f(1) ==", "they are not Python"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tests(text)
    with pytest.raises(ValueError, match="they call nothing"):
        read_tests(["import math", "x = 1"])
    with pytest.raises(ValueError, match=r"functional needs the name of the function: .*entry_column"):
        read_tests([{"input": "1", "output": "1", "testtype": "functional"}])
    with pytest.raises(ValueError, match="a call needs the name of a function and a list"):
        read_tests({"fn_name": "os.system", "inputs": [["true"]], "outputs": [0]})


@needs_bubblewrap
def test_a_row_that_does_not_name_its_function_is_told(score: Score) -> None:
    with pytest.raises(DataError, match=r"column 'entry_point' \(reward.code.entry_column\), and prompt 0 has None"):
        score("x = 1", CHECK, entry_point=None)
