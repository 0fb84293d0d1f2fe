"""What a rule is: a function of a library in which a thread waits, and how to read what for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from offbeat_liveness._process.head import OutsideWait
from offbeat_liveness._process.outside import peek


@dataclass
class Look:
    """One question about one thread.

    Args:
        frames: of the thread, innermost first.
        native_id: the kernel's number of the thread, None where it is not known.
        follow: what another thread waits for, by its ident.
        depth: of the frame that the rule has matched.
    """

    frames: list[FrameType]
    native_id: int | None
    follow: Callable[[int], OutsideWait | None]
    depth: int = 0

    def outward(self, limit: int) -> Iterator[FrameType]:
        """The matched frame and the next ones that have called it."""
        return iter(self.frames[self.depth : self.depth + limit])

    def local(self, file: str, function: str, name: str) -> Any:
        """A local of the frame nearest to the innermost that runs such a function; None if there is none."""
        for frame in self.frames:
            if frame.f_code.co_qualname == function and file in frame.f_code.co_filename:
                return peek.local(frame, name)
        return None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Functions of one file of a library.

    Args:
        file: how the name of the file ends.
        functions: qualified names, such as "Queue.get"; "Mixin.*" for all of a class, "*" for all of the file.
        read: what is waited for, given the frame.
        reach: how many frames may lie between the wait itself, or an inner match, and this one: what lies further
            out has called the user's code, and is not what is waited in.
    """

    file: str
    functions: tuple[str, ...]
    read: Callable[[FrameType, Look], OutsideWait | None] = field(repr=False)
    reach: int = 3


def seconds(timeout: object) -> str:
    """Text such as ", timeout 30 s"; "" where there is none."""
    value = peek.number(timeout)
    return "" if value is None else f", timeout {value:g} s"
