"""How a process ends and which exceptions explain that: of its main thread, of its other threads, of native code.

A process that is killed cannot say anything; that is how the others tell.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing.util
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.proc import HOST
from offbeat_liveness._process.snapshot import CallSite
from offbeat_liveness._process.stacks import OWN_THREADS, current_exceptions, readable

Farewell = Callable[[BaseException | None], None]
MAX_ERROR: Final = 400
GLOO_PLACE: Final = re.compile(r"\[/[^]]*gloo/[^]]*\] ")  # the line of gloo's own source
GLOO_ADVICE: Final = " This is typically caused by"
EARLY: Final = 1000  # before multiprocessing's own finalizers
MAX_REMEMBERED: Final = 8
PREFIX: Final = ".fatal-"
FRAME: Final = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
REASON: Final = re.compile(r"Fatal Python error: (.+)")
MAX_BYTES: Final = 1 << 16
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW


class ExitHook:
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
    """As `describe`, from stored data alone: nothing of the program is called."""
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
    """The exception behind a launcher's sys.exit(1); None behind sys.exit(0)."""
    if not isinstance(error, SystemExit):
        return error
    if error.code in (None, 0):
        return None
    return error.__context__ or error


class ThreadErrors:
    """Remembers which threads an exception has ended; the program's own hook is called as before."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, str]] = []
        self._hook: Callable[[Any], object] = threading.excepthook
        threading.excepthook = self._on_exception

    def close(self) -> None:
        if threading.excepthook == self._on_exception:
            threading.excepthook = self._hook

    def notes(self, who: str) -> tuple[str, ...]:
        now_s = time.monotonic()
        return tuple(f"{who}: {text}, {now_s - seen_s:.0f} s ago" for seen_s, text in self._seen)

    def _on_exception(self, raised: Any) -> None:
        if raised.thread and raised.thread.name.startswith(OWN_THREADS):
            threading.__excepthook__(raised)  # errors of the watch do not reach the program's hook
            return
        self._hook(raised)
        if raised.exc_value is None or isinstance(raised.exc_value, SystemExit):
            return
        text, stack = describe(raised.exc_value)
        where = f" at {stack[0]}" if stack else ""
        name = raised.thread.name if raised.thread else "?"
        self._seen.append((time.monotonic(), f"its thread {name!r} was ended by {text}{where}"))
        del self._seen[:-MAX_REMEMBERED]


def exception_in_flight(ident: int) -> str:
    """The exception that a thread handles, or cleans up after, and where it was raised; "" if there is none."""
    error = current_exceptions().get(ident)
    error = error[1] if isinstance(error, tuple) else error  # Python 3.11 gives what exc_info does
    if not isinstance(error, BaseException):
        return ""
    text, stack = read_exception(error)
    return text + (f" (raised at {stack[0]})" if stack else "")


class CrashFile:
    """Has faulthandler write to a file in the dump folder, unless the program uses faulthandler itself.

    It keeps the Python stack of a process that native code ends, as gloo does when more bytes come than a tensor holds.
    A program that enables faulthandler later takes it over, and loses it when this is closed: Python does not tell
    whose file it writes to.
    """

    def __init__(self, directory: Path) -> None:
        self._path = path_of(directory, HOST, os.getpid())
        self._file = None
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                self._file = os.fdopen(os.open(self._path, NEW_FILE, 0o600), "w")
                faulthandler.enable(self._file)

    def close(self) -> None:
        if self._file is not None:
            self.forget()
            self._path.unlink(missing_ok=True)

    def forget(self) -> None:
        """In a forked child: the file is the parent's."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None


def path_of(directory: Path, machine: str, pid: int) -> Path:
    """File of one process: hosts that share a folder may have the same pids."""
    return directory / f"{PREFIX}{plain_name(machine)}-{pid}.txt"


def plain_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def read_crash(directory: Path | None, machine: str, pid: int) -> tuple[str, tuple[CallSite, ...]]:
    """What a dead process left: the reason, and its stack, innermost first; empty if nothing."""
    if directory is None:
        return "", ()
    try:
        text = path_of(directory, machine, pid).read_bytes()[:MAX_BYTES].decode(errors="replace")
    except OSError:
        return "", ()
    reason = REASON.search(text)
    main_thread = text.rpartition("hread 0x")[2]  # told last; the one that crashed may be a thread without Python
    sites = [
        CallSite(file=each["file"], line=int(each["line"]), function=each["function"])
        for each in FRAME.finditer(main_thread)
    ]
    return (reason[1] if reason else ""), readable(sites) if sites else ()
