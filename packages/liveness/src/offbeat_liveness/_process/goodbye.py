"""Lets a process say how it ends: its exception, or that it left in order.

A process that is killed cannot say anything; that is how the others tell.
"""

import atexit
import contextlib
import multiprocessing.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final

from offbeat_liveness._process.head import CallSite
from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.stacks import readable

Farewell = Callable[[BaseException | None], None]
MAX_ERROR: Final = 400
GLOO_PLACE: Final = re.compile(r"\[/[^]]*gloo/[^]]*\] ")  # the line of gloo's own source
GLOO_ADVICE: Final = " This is typically caused by"
EARLY: Final = 1000  # before multiprocessing's own finalizers


class Goodbye:
    """Calls `farewell` once, with the exception that ends the main thread or with None.

    sys.excepthook tells of scripts; atexit of an orderly end; multiprocessing's children reach neither (before Python
    3.13 they skip atexit, and they print exceptions themselves), so a finalizer of theirs tells, with the exception
    that is in flight.
    """

    def __init__(self, farewell: Farewell) -> None:
        self._farewell, self._is_said, self._pid = farewell, False, os.getpid()
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)
        self._finalizer = multiprocessing.util.Finalize(None, self._on_exit, exitpriority=EARLY)

    def close(self) -> None:
        """Say nothing any more."""
        self._is_said = True
        atexit.unregister(self._on_exit)
        self._finalizer.cancel()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        if not _is_console(sys._getframe().f_back) and not issubclass(kind, KeyboardInterrupt):
            self._say(error)

    def _on_exit(self) -> None:
        self._say(_cause(sys.exc_info()[1]))

    def _say(self, error: BaseException | None) -> None:
        if not self._is_said and os.getpid() == self._pid:
            self._is_said = True
            with contextlib.suppress(OSError, RuntimeError):  # the run ends anyway
                self._farewell(error)


def describe(error: BaseException) -> tuple[str, tuple[CallSite, ...]]:
    """An exception in one line, and where it was raised, innermost first; calls its `__str__`, as a traceback does."""
    try:
        text = str(error)
    except Exception as other:  # noqa: BLE001 - of the program; traceback passes it over as well
        text = f"<its __str__ raised {peek.class_name(other)}>"
    return _in_one_line(error, text), _raised_at(error)


def _is_console(caller: FrameType | None) -> bool:
    """Whether a console has printed an error and goes on, pdb's too; at the end of a program nobody calls the hook."""
    return caller is not None and caller.f_globals.get("__name__") == "code"


def read_exception(error: BaseException) -> tuple[str, tuple[CallSite, ...]]:
    """Likewise from what it stores, for one that nobody has printed yet: nothing of the program is called."""
    values = peek.members(peek.attribute(error, "args"))
    texts = [str(each) if type(each) is int else peek.text(each, MAX_ERROR) for each in values]
    return _in_one_line(error, ", ".join(each for each in texts if each)), _raised_at(error)


def _in_one_line(error: BaseException, text: str) -> str:
    name = peek.class_name(error)
    notes = map(peek.text, peek.members(peek.attribute(error, "__notes__")))
    line = " ".join(" ".join([f"{name}: {text}" if text else name, *notes]).split())
    return GLOO_PLACE.sub("", line).partition(GLOO_ADVICE)[0][:MAX_ERROR]


def _raised_at(error: BaseException) -> tuple[CallSite, ...]:
    """No file is opened for this, as `traceback.extract_tb` does: that of a source may be on a disk that hangs."""
    sites = [
        CallSite(file=frame.f_code.co_filename, line=line or 0, function=frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(peek.attribute(error, "__traceback__"))
    ]
    return readable(sites[::-1])


def _cause(error: BaseException | None) -> BaseException | None:
    """What is behind a sys.exit(1) that a launcher made of an exception; nothing behind an orderly sys.exit(0)."""
    if not isinstance(error, SystemExit):
        return error
    if error.code in (None, 0):
        return None
    return error.__context__ or error
