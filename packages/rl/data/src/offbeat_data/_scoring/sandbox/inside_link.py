"""The socket between a program and the tests that call it, and the form in which values cross it.

    tests                                        program
    names that the tests use            --->     what each of them is
    call, read an attribute, iterate    --->     what it returned or raised, printed, and changed in its arguments
    result of a function of the tests   <-->     call of a function that the tests have passed

Runs inside sandboxes, in two processes (`inside_tests.py`, `inside_program.py`), with the standard library alone.
Values cross as JSON: numbers, texts and None as they are, all else as a list that begins with its kind. The other side
builds them anew and of exact types; what is not plain data crosses as a reference.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import os
import struct
import sys

TYPE_CHECKING = False  # the module typing takes as long to load as all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MESSAGE_BYTES = 1 << 24
"""Limit of one message: the most that the process with the tests holds of what a program says."""
_DEPTH = 100
"""Limit of containers in containers; what holds itself is deeper."""
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_MAPPINGS = {kind.__name__: kind for kind in (dict, collections.OrderedDict, collections.Counter)}
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
TYPES = {kind.__name__: kind for kind in (int, float, complex, str, bytes, bytearray, bool, list, tuple, set, dict)}
_WRITTEN = {"Decimal": "decimal", "Fraction": "fractions", "date": "datetime", "time": "datetime"}
_WRITTEN["datetime"] = "datetime"
"""Types that cross as text, and their modules."""
FORWARDED = (
    *("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__", "__reversed__", "__bool__"),
    *("__int__", "__float__", "__abs__", "__neg__", "__enter__", "__exit__", "__call__", "__str__", "__repr__"),
)
"""Special methods that tests may call: none hands a value to the program to which it could fit its answer."""


class NotPlainError(Exception):
    """A value that cannot cross."""


def encode(value: Any, refer: Callable[[Any, int], Any], depth: int = 0) -> Any:
    """Turn a value into what JSON can hold; `refer` is asked about what is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -(1 << 53) < value < 1 << 53 else ["int", hex(value)]
    if depth > _DEPTH:
        raise NotPlainError("it is nested too deep, or holds itself")
    name = kind.__name__
    if _SEQUENCES.get(name) is kind:
        return [name, [encode(each, refer, depth + 1) for each in value]]
    if _MAPPINGS.get(name) is kind:
        return [name, _pairs(value, refer, depth)]
    if kind is collections.defaultdict and (factory := value.default_factory) in (None, *_FACTORIES.values()):
        return [name, factory and factory.__name__, _pairs(value, refer, depth)]
    if kind is collections.deque:
        return [name, value.maxlen, [encode(each, refer, depth + 1) for each in value]]
    if kind in (bytes, bytearray):
        return [name, value.hex()]
    if kind is complex:
        return [name, value.real, value.imag]
    if kind in (range, slice):
        return [name, [encode(each, refer, depth + 1) for each in (value.start, value.stop, value.step)]]
    if name == "timedelta" and _is_of("datetime", kind):
        return [name, [value.days, value.seconds, value.microseconds]]
    if name in _WRITTEN and _is_of(_WRITTEN[name], kind):
        return [name, value.isoformat() if _WRITTEN[name] == "datetime" else str(value)]
    return refer(value, depth)


def _pairs(value: Any, refer: Callable[[Any, int], Any], depth: int) -> list[Any]:
    return [[encode(key, refer, depth + 1), encode(each, refer, depth + 1)] for key, each in value.items()]


def _is_of(module: str, kind: type) -> bool:
    return module in sys.modules and getattr(sys.modules[module], kind.__name__, None) is kind


def decode(data: Any, resolve: Callable[[Any], Any]) -> Any:
    """Build a value from what `encode` has made; `resolve` is asked about references."""
    if type(data) is dict:
        raise NotPlainError("a mapping stands where a value should")
    if type(data) is not list:
        return data
    tag, last = data[0], data[-1]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([decode(each, resolve) for each in last])
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({decode(key, resolve): decode(each, resolve) for key, each in last})
    if tag in _BUILT:
        return _BUILT[tag](data, last)
    if tag == "defaultdict":
        pairs = {decode(key, resolve): decode(each, resolve) for key, each in last}
        return collections.defaultdict(None if data[1] is None else _FACTORIES[data[1]], pairs)
    if tag == "deque":
        return collections.deque([decode(each, resolve) for each in last], data[1])
    if tag == "namedtuple":
        return collections.namedtuple(data[1], data[2])(*(decode(each, resolve) for each in last))
    if tag in ("range", "slice"):
        return getattr(builtins, tag)(*(decode(each, resolve) for each in last))
    if tag == "ndarray":
        return importlib.import_module("numpy").array(decode(last, resolve), dtype=data[1]).reshape(data[2])
    return resolve(data)


def _from_text(data: list[Any], text: str) -> Any:
    kind = getattr(importlib.import_module(_WRITTEN[data[0]]), data[0])
    return kind.fromisoformat(text) if _WRITTEN[data[0]] == "datetime" else kind(text)


_BUILT: dict[str, Callable[[list[Any], Any], Any]] = {
    **dict.fromkeys(_WRITTEN, _from_text),
    "int": lambda _, digits: int(digits, 16),
    "complex": lambda data, _: complex(data[1], data[2]),
    "bytes": lambda _, digits: bytes.fromhex(digits),
    "bytearray": lambda _, digits: bytearray.fromhex(digits),
    "timedelta": lambda _, parts: importlib.import_module("datetime").timedelta(*parts),
    "builtin": lambda _, name: TYPES[name] if name in TYPES else error_of_python(name),
}


def error_of_python(name: str) -> type[BaseException]:
    """Find a built-in exception.

    Raises:
        NotPlainError: there is none of this name.
    """
    kind = vars(builtins).get(name)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise NotPlainError(f"{name!r} is no exception of Python")
    return kind


class Link:
    """Messages to the other process, one at a time.

    Args:
        descriptor: of the socket.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: list[Any]) -> None:
        """Send a message.

        Raises:
            NotPlainError: it is too large.
        """
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise NotPlainError(f"it is larger than {MESSAGE_BYTES} bytes")
        data = struct.pack("<Q", len(data)) + data
        while data:
            data = data[os.write(self._descriptor, data) :]

    def receive(self) -> Any:
        """Read the next message; None where the other side has ended, or would send more than it may."""
        head = self._read(8)
        size = struct.unpack("<Q", head)[0] if head else MESSAGE_BYTES + 1
        data = self._read(size) if size <= MESSAGE_BYTES else None
        return data and json.loads(data)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._descriptor, min(size - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)
