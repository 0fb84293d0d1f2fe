"""Runs tests whose functions under test are in another process, which lies wherever that pays.

What the program says arrives as data of exact types, so `==` in a test is Python's own. Everything else is a `Remote`:
it can be called and looked at, and refuses what would let the program decide a comparison.

Runs inside a sandbox, with the standard library alone: see `inside_link.py`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import hashlib
import importlib
import io
import json
import os
import sys
import types

from offbeat_data._scoring.sandbox.inside_link import FORWARDED, Link, NotPlainError, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod"),
    *("divmod", "pow", "lshift", "rshift", "and", "or", "xor"),
)
_REFUSED = (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__index__", "__reduce_ex__"),
    *(f"__{side}{name}__" for side in ("", "r", "i") for name in _BINARY),
)
_OWN = {"isclose": "math", "Decimal": "decimal", "Fraction": "fractions", "datetime": "datetime", "date": "datetime"}
_OWN.update(dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"))
_OWN.update(dict.fromkeys(("math", "cmath", "operator", "itertools", "functools", "collections", "re", "json"), ""))
_OWN.update({"copy": "", "numpy": "", "np": ""})
"""Names that tests judge with and that programs import for them: a name and its module, or a module itself."""
_SHOWN = ("__array__", "__dict__", "__doc__", "__module__", "__name__", "__qualname__", "__wrapped__")
"""Names in two underscores that tests see of an object of the program, besides its special methods."""
_WHY_LENGTH = 300


class Refused(BaseException):
    """A test asks for what would let the program decide; no `except Exception` of the test catches it."""


class Gone(BaseException):
    """The program has ended, or says what cannot be read."""


def _is_protocol(name: str) -> bool:
    """Tell whether a library asks for it, not a test: numpy would have an `__array_function__` compare."""
    return name.startswith("_offbeat") or (name.startswith("__") and name.endswith("__") and name not in _SHOWN)


class Remote:
    """An object of the program."""

    __slots__ = ("_offbeat_id",)
    _offbeat_link: Runner

    def __getattr__(self, name: str) -> Any:
        if _is_protocol(name):
            raise AttributeError(name)
        return self._offbeat_link.ask("get", self._offbeat_id, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._offbeat_link.ask("set", self._offbeat_id, name, self._offbeat_link.encode(value))


class RemoteType(type):
    """The class of a `Remote`, for a class of the program: makes objects and has attributes."""

    _offbeat_link: Runner
    _offbeat_class: int

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> RemoteType:
        base = next(base for base in bases if isinstance(base, RemoteType))
        return base._offbeat_link.refuse(f"a test derives a class from {base.__name__}, a class of the program")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._offbeat_link.call("call", cls._offbeat_class, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if _is_protocol(name):
            raise AttributeError(name)
        return cls._offbeat_link.ask("get", cls._offbeat_class, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._offbeat_link.ask("set", cls._offbeat_class, name, cls._offbeat_link.encode(value))


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "__call__":
            return self._offbeat_link.call("call", self._offbeat_id, args, kwargs)
        return self._offbeat_link.call("special", self._offbeat_id, args, kwargs, name)

    return forward


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any) -> Any:
        if name in ("__eq__", "__ne__") and args[0] is None:
            return name == "__ne__"
        kind = type(self).__name__
        return self._offbeat_link.refuse(
            f"a test compares or combines ({name}) an object of the program, of class {kind}"
        )

    return refuse


for _name in _REFUSED:
    setattr(Remote, _name, _refusing(_name))


def _equal_by_value(self: Any, other: Any) -> bool:
    """Compare the plain data in an object whose class is a subclass of list, dict, int and so on."""
    return bool(self._offbeat_link.ask("plain", self._offbeat_id) == other)


def _unequal_by_value(self: Any, other: Any) -> bool:
    return not _equal_by_value(self, other)


class Runner(Link):
    """Asks a program.

    Attributes:
        refused: what tests have asked for and did not get, as text.
        num_failed: assertions that failed in functions of the tests while the program called them.
        is_gone: it cannot be asked any longer.
        expects_stop: the test that runs names StopIteration, and so may get it from any call.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.refused: list[str] = []
        self.num_failed = 0
        self.is_gone = self.expects_stop = False
        self._known: dict[int, Any] = {}
        self._functions: list[Callable[..., Any]] = []
        self._input = builtins.input, sys.stdin

    def names(self, words: list[str]) -> dict[str, Any]:
        """Give the names among these that the program defines, with what they are.

        One that is called like something of Python's own is what the tests are about only where they use no other
        name of the program. Else a program could bring an `abs` or an `isclose` that says what its author likes.
        """
        answer = self._exchange(["names", words])
        with self._reading():
            found = {name: answer[1][name] for name in words if name in answer[1]}
            brought = {}
            for name, data in found.items():
                is_own = len(found) > 1 and (name in _OWN or hasattr(builtins, name))
                with contextlib.suppress(ImportError):
                    if name in _OWN or not is_own:
                        brought[name] = _own(name) if is_own else self._global(data)
            return brought

    def ask(self, *message: Any) -> Any:
        """Have the program do something: its result, or the exception that it raises."""
        return self._result(self._exchange(list(message)), (), {})

    def call(self, kind: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], *more: str) -> Any:
        """Call something of the program; what it changes in lists, dictionaries and sets is changed here, too."""
        if self._input[0] is not builtins.input or self._input[1] is not sys.stdin:
            self.refuse("a test replaces input or sys.stdin, which the program does not see")
        positional = [self.encode(each) for each in args]
        named = {key: self.encode(each) for key, each in kwargs.items()}
        answer = self._exchange([kind, number, positional, named, *more])
        return self._result(answer, args, kwargs, may_stop=more == ("__next__",))

    def encode(self, value: Any) -> Any:
        """Turn a value of a test into what the program gets."""
        try:
            return encode(value, self._refer)
        except NotPlainError as error:
            return self.refuse(f"a test passes a value that cannot be sent: {error}")

    def refuse(self, why: str) -> NoReturn:
        self.refused.append(why)
        raise Refused(why)

    def _refer(self, value: Any, _depth: int) -> Any:
        kind = type(value)
        if kind is RemoteType:
            return ["yours", value._offbeat_class]
        if isinstance(kind, RemoteType) or (isinstance(value, BaseException) and "_offbeat_id" in vars(value)):
            return ["yours", value._offbeat_id]
        if isinstance(value, type) and getattr(builtins, name := value.__name__, None) is value:
            return ["builtin", name]
        if callable(value) and not isinstance(value, type):
            self._functions.append(value)
            return ["back", len(self._functions) - 1]
        return self.refuse(f"a test passes an object of class {kind.__name__}, which is not plain data")

    def _exchange(self, message: list[Any]) -> Any:
        """Send a message and read the answer, while the program may call functions of the tests."""
        if self.is_gone:
            raise Gone
        try:
            self.send(message)
        except NotPlainError as error:
            self.refuse(f"a test passes a value that cannot be sent: {error}")
        except OSError as error:
            self.is_gone = True
            raise Gone from error
        while True:
            with self._reading():
                if (answer := self.receive()) is None:
                    raise NotPlainError("the program has ended")
                number, args = (answer[1], answer[2]) if answer[0] == "back" else (None, [])
                function = None if number is None else self._functions[number]
                args = [self._decode(each) for each in args]
            if function is None:
                return answer
            self.send(self._called_back(function, args))

    def _called_back(self, function: Callable[..., Any], args: list[Any]) -> list[Any]:
        try:
            return ["returned", self.encode(function(*args))]
        except Exception as error:  # noqa: BLE001  whatever a test raises, the program that has called it gets
            self.num_failed += isinstance(error, AssertionError)  # which the program may catch
            return ["raised", type(error).__name__, str(error)]

    @contextlib.contextmanager
    def _reading(self) -> Any:
        """Whatever is wrong with what a program says, it is not asked again."""
        try:
            yield
        except Refused:
            raise
        except BaseException as error:
            self.is_gone = True
            raise Gone(f"the program's answer cannot be read: {error!r}") from error

    def _result(self, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_stop: bool = False) -> Any:
        with self._reading():
            outcome, value, printed, changed = answer
            if outcome == "refused":
                self.refuse(str(value))
            for at, data in changed:
                _replace(kwargs[at] if type(at) is str else args[at], self._decode(data))
            result = self._decode(value) if outcome == "returned" else self._error(*value)
            printed = str(printed)
        if printed:
            sys.stdout.write(printed)
        if outcome == "returned":
            return result
        if isinstance(result, (StopIteration, StopAsyncIteration)) and not (may_stop or self.expects_stop):
            # In all(map(...)) or zip(map(...)) it would end the loop of the test before anything is compared.
            self.refuse(f"the program raises {type(result).__name__}, which ends loops, where it is no iterator")
        raise result

    def _global(self, data: Any) -> Any:
        is_module = type(data) is list and data[0] == "module"  # this process has its own
        return importlib.import_module(data[1]) if is_module else self._decode(data)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _resolve(self, data: list[Any]) -> Any:
        tag, number = data[0], data[1]
        if tag == "back":
            return self._functions[number]
        if tag == "module":
            self.refuse("a test gets a module from the program")
        if number not in self._known:
            self._known[number] = _MAKERS[tag](self, *data[1:])
        return self._known[number]

    def _make_class(self, number: int, name: str, bases: list[Any], special: list[str], is_error: bool) -> type:
        kinds = [self._decode(base) for base in bases]
        if is_error:
            space: dict[str, Any] = {"__getattr__": _attribute_of_error, "__str__": _text_of_error}
            return type(name, tuple(kinds) or (Exception,), space)
        space = {each: _forwarding(each) for each in FORWARDED if each in special}
        space.update(__slots__=(), _offbeat_link=self, _offbeat_class=number)
        if not {"__iter__", "__getitem__"} & set(special):  # else Python compares what is in it
            space["__contains__"] = _refusing("__contains__")
        if "plain" in special:
            space.update(__eq__=_equal_by_value, __ne__=_unequal_by_value, __hash__=None)
        return type.__new__(RemoteType, name, tuple(k for k in kinds if type(k) is RemoteType) or (Remote,), space)

    def _make_object(self, number: int, kind: Any) -> Any:
        found = object.__new__(self._decode(kind))
        object.__setattr__(found, "_offbeat_id", number)
        return found

    def _make_coroutine(self, number: int) -> Any:
        async def wait() -> Any:
            return self.ask("await", number)

        return wait()

    def _error(self, kind: Any, text: str, args: Any, number: int) -> BaseException:
        kind = self._decode(kind)
        try:
            error = kind(*self._decode(args))
        except Exception:  # noqa: BLE001  its class may want other arguments than it shows
            error = kind.__new__(kind)
        vars(error).update(_offbeat_text=str(text), _offbeat_id=number, _offbeat_link=self)
        assert isinstance(error, BaseException)
        return error


_MAKERS: dict[str, Callable[..., Any]] = {
    "class": Runner._make_class,
    "object": Runner._make_object,
    "coroutine": Runner._make_coroutine,
}


def _attribute_of_error(self: Any, name: str) -> Any:
    if name.startswith(("_offbeat", "__")) or "_offbeat_id" not in vars(self):
        raise AttributeError(name)
    return self._offbeat_link.ask("get", self._offbeat_id, name)


def _text_of_error(self: Any) -> str:
    return str(vars(self).get("_offbeat_text") or BaseException.__str__(self))


def _replace(value: Any, new: Any) -> None:
    """Make an argument what the program has made of it."""
    if type(value) is not type(new):
        raise NotPlainError("an argument has become something else")
    if type(value) in (list, bytearray):
        value[:] = new
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(new)
    else:
        value.clear()
        value.update(new)


def _own(name: str) -> Any:
    if not _OWN[name]:
        return importlib.import_module({"np": "numpy"}.get(name, name))
    return getattr(importlib.import_module(_OWN[name]), name)


def run(descriptor: int, setup: str, tests: list[str], names: list[str]) -> Iterator[tuple[int, int, str]]:
    """Run tests one after another: of each its number, 1 or 0, and why it asked for what it cannot get."""
    runner, module = Runner(descriptor), types.ModuleType("solution")
    sys.modules["solution"] = module
    space = vars(module)
    is_set_up = _holds(runner, lambda: space.update(runner.names(names)))
    is_set_up = is_set_up and _holds(runner, lambda: _execute(setup, space))
    for number, test in enumerate(tests):
        before = len(runner.refused) if is_set_up else 0
        runner.expects_stop = "StopIteration" in test or "StopAsyncIteration" in test
        holds = is_set_up and _holds(runner, lambda test=test: _execute(test, space))  # type: ignore[misc]
        yield number, int(holds), "".join(runner.refused[before : before + 1])[:_WHY_LENGTH]


def _execute(text: str, space: dict[str, Any]) -> None:
    exec(compile(text, "test.py", "exec"), space)


def _holds(runner: Runner, work: Callable[[], None]) -> bool:
    """Tell whether it runs to its end, and all that it asked of the program could be asked and was answered."""
    before = len(runner.refused), runner.num_failed
    try:
        work()
    except BaseException:  # noqa: BLE001  SystemExit, too: a test that does not come to its end has failed
        return False
    return (len(runner.refused), runner.num_failed) == before and not runner.is_gone


def _start_program(source: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the program where both are in one sandbox, as a process that cannot look into this one.

    Memory and descriptors of a process that is not dumpable are closed to others of its own user.
    """
    import ctypes
    import socket
    import subprocess

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-"]
    null = subprocess.DEVNULL
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=null, pass_fds=[theirs.fileno()])
    theirs_number = theirs.fileno()
    theirs.close()
    start = f"import sys\nsys.path[:] = {sys.path!r}\nDESCRIPTOR = {theirs_number}\n{source}"
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(start.encode(errors="surrogateescape"))
    return process, ours.detach()


def main(descriptor: int | None, source: str) -> None:
    """Read setup and tests from stdin, run them, and print of each what came of it, as a line of JSON.

    Each is followed by its digest under the key that came with the tests: others may print here, too.

    Args:
        descriptor: of the socket to the program; None: it is to be started here, from `source`.
        source: what runs the program and answers for it.
    """
    given, out = json.load(sys.stdin), os.dup(1)
    sys.stdin, sys.stdout = io.StringIO(""), open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    process = None
    if descriptor is None:
        process, descriptor = _start_program(source)
    key = bytes.fromhex(given["key"])
    for result in run(descriptor, given["setup"], given["tests"], given["names"]):
        line = json.dumps(result)
        os.write(out, f"\n{line} {hashlib.blake2b(line.encode(), key=key).hexdigest()}\n".encode())
    if process:
        process.kill()
    os._exit(0)
