"""Runs a program, and answers for it when tests call its functions. Nothing that it says is trusted: a program can
change all of this, and still say no more than a function of its own could have returned.

Runs inside a sandbox, with the standard library alone: see `inside_link.py`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import importlib
import io
import os
import sys
import types

from offbeat_data._scoring.sandbox.inside_link import (
    FORWARDED,
    TYPES,
    Link,
    NotPlainError,
    decode,
    encode,
    error_of_python,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, bytes),
    (list, list),
    (tuple, tuple),
    (set, set),
    (frozenset, frozenset),
    (dict, dict),
)
"""Plain types, and how their data is read from an object of a subclass."""


class Server(Link):
    """Answers for a program.

    Args:
        descriptor: of the socket.
        space: names of the program.
    """

    def __init__(self, descriptor: int, space: dict[str, Any]) -> None:
        super().__init__(descriptor)
        self._space = space
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._classes: dict[int, list[Any]] = {}

    def serve(self) -> None:
        """Answer until the tests have ended."""
        while (message := self.receive()) is not None:
            self._answer(message)

    def call_back(self, number: int, args: tuple[Any, ...]) -> Any:
        """Call a function of the tests, and answer meanwhile."""
        self.send(["back", number, [encode(each, self._refer) for each in args]])
        while (message := self.receive()) is not None:
            if message[0] == "returned":
                return self._decode(message[1])
            if message[0] == "raised":
                raise _error_of_test(message[1])(message[2])
            self._answer(message)
        os._exit(1)

    def _answer(self, message: list[Any]) -> None:
        answer = self._names(message[1]) if message[0] == "names" else self._done(message)
        try:
            self.send(answer)
        except NotPlainError as error:
            self.send(_cannot_cross(error))

    def _names(self, words: list[str]) -> list[Any]:
        found = {}
        for name in words:
            if name in self._space:
                value = self._space[name]
                try:
                    found[name] = encode(value, self._refer)
                except NotPlainError:
                    found[name] = self._as_object(value)
        return ["names", found]

    def _done(self, message: list[Any]) -> list[Any]:
        """Do what is asked: outcome, result or exception, what was printed, and arguments that have changed."""
        sys.stdout = io.StringIO()
        given: list[tuple[int | str, Any]] = []
        args: dict[int | str, Any] = {}
        try:
            if message[0] in ("call", "special"):
                given = [*enumerate(message[2]), *message[3].items()]
                args = {at: self._decode(data) for at, data in given}
            outcome = ["returned", self._do(message, args)]
        except NotPlainError as error:
            return _cannot_cross(error)
        except BaseException as error:  # noqa: BLE001  SystemExit, too, goes to the test that has called
            outcome = ["raised", self._of_error(error)]
        return [*outcome, sys.stdout.getvalue(), list(self._changed(given, args))]

    def _do(self, message: list[Any], args: dict[int | str, Any]) -> Any:
        kind, found = message[0], self._objects[message[1]]
        if kind == "get":
            return encode(getattr(found, message[2]), self._refer)
        if kind == "set":
            return setattr(found, message[2], self._decode(message[3]))
        if kind == "plain":
            return encode(_plain(found), self._refer)
        if kind == "await":
            return encode(importlib.import_module("asyncio").run(found), self._refer)
        positional = [value for at, value in args.items() if isinstance(at, int)]
        if kind == "special":
            return encode(getattr(type(found), message[4])(found, *positional), self._refer)
        result = found(*positional, **{at: value for at, value in args.items() if isinstance(at, str)})
        is_own = isinstance(found, type) and type(result).__module__ == "solution"
        return self._as_object(result) if is_own else encode(result, self._refer)

    def _changed(self, given: list[tuple[int | str, Any]], args: dict[int | str, Any]) -> Iterator[list[Any]]:
        for at, data in given:
            if isinstance(args.get(at), (list, dict, set, bytearray, collections.deque)):
                with contextlib.suppress(NotPlainError):
                    if (now := encode(args[at], self._refer)) != data:
                        yield [at, now]

    def _refer(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, Callback):
            return ["back", value.number]
        if kind is types.ModuleType:
            return ["module", value.__name__]
        if isinstance(value, type):
            return self._of_class(value)
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
            if value.shape == ():
                return encode(value.item(), self._refer, depth + 1)
            return ["ndarray", value.dtype.str, list(value.shape), encode(value.ravel().tolist(), self._refer, depth)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            fields = [encode(each, self._refer, depth + 1) for each in value]
            return ["namedtuple", kind.__name__, list(kind._fields), fields]
        plain = _plain(value)
        return self._as_object(value) if plain is value else encode(plain, self._refer, depth + 1)

    def _as_object(self, value: Any) -> list[Any]:
        if type(value) is types.CoroutineType:
            return ["coroutine", self._number(value)]
        return ["object", self._number(value), self._of_class(type(value))]

    def _of_class(self, kind: type) -> list[Any]:
        if vars(builtins).get(kind.__name__) is kind and (kind in TYPES.values() or issubclass(kind, BaseException)):
            return ["builtin", kind.__name__]
        if id(kind) not in self._classes:
            special = [name for name in FORWARDED if getattr(kind, name, None) is not None]
            if any(issubclass(kind, base) for base, _ in _BASES):
                special.append("plain")
            bases = [self._of_class(base) for base in kind.__bases__ if base is not object]
            is_error = issubclass(kind, BaseException)
            self._classes[id(kind)] = ["class", self._number(kind), kind.__name__, bases, special, is_error]
        return self._classes[id(kind)]

    def _of_error(self, error: BaseException) -> list[Any]:
        try:
            args = encode(tuple(error.args), self._refer)
        except NotPlainError:
            args = ["tuple", []]
        return [self._of_class(type(error)), str(error), args, self._number(error)]

    def _number(self, value: Any) -> int:
        """Number an object; it is kept, so that its number stays its own."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _resolve(self, data: list[Any]) -> Any:
        return Callback(self, data[1]) if data[0] == "back" else self._objects[data[1]]


class Callback:
    """A function of the tests."""

    def __init__(self, server: Server, number: int) -> None:
        self._server, self.number = server, number

    def __call__(self, *args: Any) -> Any:
        return self._server.call_back(self.number, args)


def _cannot_cross(error: NotPlainError) -> list[Any]:
    return ["refused", f"what the program returns cannot be sent: {error}", "", []]


def _error_of_test(name: str) -> type[BaseException]:
    try:
        return error_of_python(name)
    except NotPlainError:
        return Exception


def _plain(value: Any) -> Any:
    """Read the plain data of an object whose class is a subclass of a plain type; any other object is returned."""
    return next((read(value) for base, read in _BASES if issubclass(type(value), base)), value)


def main(descriptor: int, source: str) -> None:
    """Run the program as a module named solution, and answer for it."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.stdin, sys.stdout = io.StringIO(""), io.StringIO()
    exec(compile(source, "solution.py", "exec"), vars(module))
    Server(descriptor, vars(module)).serve()
    os._exit(0)
