"""Reads the program's own objects without running any of its code, taking a lock, or changing anything.

An attribute may be a property, a name may come from `__getattr__`, a text from `__str__`: all of these are the
program's code, and that may want the very lock that everybody waits for. What is read here is stored data only.
The rules of the other modules, each for a function of a library in which a thread waits, are made of these.
"""

import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.snapshot import OutsideKind, OutsideWait
from offbeat_liveness._process.stacks import python_threads

MAX_TEXT: Final = 120
MAX_MEMBERS: Final = 64
_ORDER: Final = type.__dict__["__mro__"]
_NAMES: Final = type.__dict__["__dict__"]
_STORED: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)
_PLAIN: Final = frozenset({bool, int, float, str, bytes, type(None)})


def attribute(owner: object, name: str) -> Any:
    """Return what an object stores under a name: in its dict, in a slot, or in C; None where it stores nothing.

    Properties, `__getattr__` and `__getattribute__` of its class are not called.
    """
    spaces = [_NAMES.__get__(base) for base in _ORDER.__get__(type(owner))]
    found = next((space[name] for space in spaces if name in space), None)
    if type(found) in _STORED or type(found) in _PLAIN:  # then Python's own look-up calls nothing of the program
        try:
            return object.__getattribute__(owner, name)
        except AttributeError:
            return None
    stored = next((space["__dict__"] for space in spaces if "__dict__" in space), None)
    if type(stored) is not types.GetSetDescriptorType:
        return None
    return dict.get(stored.__get__(owner), name)


def path(owner: object, names: str) -> Any:
    for name in names.split("."):
        if owner is None:
            return None
        owner = attribute(owner, name)
    return owner


def local(frame: FrameType, name: str) -> Any:
    """Return a local of a library's frame; None where it has none.

    Up to Python 3.12 a frame keeps the dict that is made for this until it ends, with all that was in it: in a frame of
    the user's that might be a batch which it wants to free. So ask library frames only; for others, `own_local`.
    """
    return frame.f_locals.get(name)


def own_local(frame: FrameType, name: str) -> Any:
    """Return a name in a frame of the user's, read only where that keeps nothing alive (see `local`)."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return frame.f_locals.get(name)
    return None


def text(value: Any, max_chars: int = MAX_TEXT) -> str:
    """Return a str or bytes as an exact str, cut short; "" for anything else."""
    if issubclass(type(value), str):
        cut = str.__getitem__(value, slice(0, max_chars))
        return cut + "…" if str.__len__(value) > max_chars else cut
    return bytes.decode(value[:max_chars], errors="replace") if type(value) is bytes else ""


def number(value: object) -> float | None:
    return value if type(value) in (int, float) else None  # type: ignore[return-value]


def integer(value: object) -> int | None:
    return value if type(value) is int else None


def size(value: object) -> int | None:
    """Length of one of Python's own containers; None for anything else, whose `__len__` would be the program's."""
    return len(value) if type(value) in (list, tuple, dict, set, frozenset, deque) else None  # type: ignore[arg-type]


def members(value: object) -> list[Any]:
    """Return the first members of one of Python's own containers, the values of a dict; copied in one step."""
    if type(value) is dict:
        return list(value.values())[:MAX_MEMBERS]
    if type(value) in (list, tuple, set, frozenset, deque):
        return list(value)[:MAX_MEMBERS]  # type: ignore[call-overload,no-any-return]
    return []


def type_name(value: object) -> str:
    return type.__dict__["__name__"].__get__(type(value))  # type: ignore[no-any-return]


def class_name(value: object) -> str:
    """Name of an object's class with its module, as a traceback has it."""
    name: str = type.__dict__["__qualname__"].__get__(type(value))
    module = text(type.__dict__["__module__"].__get__(type(value)))
    return name if module in ("", "builtins", "__main__") else f"{module}.{name}"


def thread_names() -> dict[int, str]:
    return {each.ident or 0: text(attribute(each, "_name")) for each in python_threads()}


@dataclass
class Look:
    """One question about one thread.

    Attributes:
        frames: of the thread, innermost first.
        follow: what another thread waits for, by its ident.
        depth: of the frame that the rule has matched.
    """

    frames: list[FrameType]
    native_id: int | None
    follow: Callable[[int], OutsideWait | None]
    depth: int = 0

    def outward(self, limit: int) -> Iterator[FrameType]:
        return iter(self.frames[self.depth : self.depth + limit])

    def local(self, file: str, function: str, name: str) -> Any:
        for frame in self.frames:
            if frame.f_code.co_qualname == function and file in frame.f_code.co_filename:
                return local(frame, name)
        return None


@dataclass(frozen=True)
class Rule:
    """Functions of one file of a library, by qualified name ("Queue.get"), in which a thread waits.

    Args:
        file: how the name of the file ends.
        read: what is waited for, given the frame.
        reach: how many frames may lie between the wait itself, or an inner match, and this one: what lies further out
            has called the user's code, and is not what is waited in.
    """

    file: str
    functions: tuple[str, ...]
    read: Callable[[FrameType, Look], OutsideWait | None] = field(repr=False)
    reach: int = 3


def seconds(timeout: object) -> str:
    """Text such as ", timeout 30 s"; "" where there is none."""
    value = number(timeout)
    return "" if value is None else f", timeout {value:g} s"


def timed_wait(
    kind: OutsideKind, text: str, timeout: object = None, *, on: str = "", address: str = "", pid: int = 0
) -> OutsideWait:
    """Return a wait whose text ends with the timeout of the call, where it has one."""
    return OutsideWait(
        kind=kind, text=text + seconds(timeout), on=on, address=address, pid=pid, timeout_s=number(timeout)
    )
