"""Ends of a process, and exceptions that explain them: of its main thread, of its other threads, of native code.

A process that is killed cannot report anything; that is how the others recognize it.
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
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from offbeat_liveness._process.outside.error_text import Description, describe, read_exception
from offbeat_liveness._process.proc import HOST
from offbeat_liveness._process.snapshot import CallSite
from offbeat_liveness._process.stacks import OWN_THREADS, current_exceptions, main_thread_ident, readable

ReportEnd = Callable[[BaseException | None, bool], None]
"""Called with the exception, if there is one, and whether the end is certain."""
OUTERMOST: Final = ("<module>", "_run_module_as_main")
"""Functions that the interpreter calls to run a program: a script, or the module of `python -m`."""
FINALIZERS: Final = "/multiprocessing/util.py"
LAST_WORDS_S: Final = 1.0  # a program that reports many errors is not to pay for each
EARLY: Final = 1000  # before multiprocessing's own finalizers
MAX_REMEMBERED: Final = 8
PREFIX: Final = ".fatal-"
FRAME: Final = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
REASON: Final = re.compile(r"Fatal Python error: (.+)")
MAX_BYTES: Final = 1 << 16
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW


class ErrorNotes:
    """Record of the last errors that this process has survived: one of them may be why it does not continue."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}  # when last, and how often

    def add(self, text: str) -> None:
        _, count = self._seen.pop(text, (0.0, 0))
        self._seen[text] = time.monotonic(), count + 1
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.pop(next(iter(self._seen)), None)

    def lines_for(self, name: str) -> tuple[str, ...]:
        """Return lines for a verdict, each with the name of this process and how long ago it was."""
        now_s = time.monotonic()
        return tuple(
            f"{name}: {text}, {f'{count} times, the last ' if count > 1 else ''}{now_s - seen_s:.0f} s ago"
            for text, (seen_s, count) in self._seen.copy().items()
        )


class ExitHook:
    """Hook that calls `report_end` with how this process ends: the exception that ends its main thread, or None.

    sys.excepthook is called for scripts, atexit at an orderly end; multiprocessing's children reach neither (before
    Python 3.13 they skip atexit, and they print exceptions themselves), so a finalizer of theirs reports, with the
    exception that is in flight.

    Programs call these too, and keep running: sys.excepthook to print an error that they have caught, atexit's
    functions before they turn into another program. So an end is certain, and reported once, only where the program's
    outermost frame runs no more. All else are notices of errors, which count once the process is gone.
    """

    def __init__(self, report_end: ReportEnd, notes: ErrorNotes) -> None:
        self._report_end, self._notes, self._is_said, self._pid = report_end, notes, False, os.getpid()
        self._reported: Description | None = None
        self._words_s = -LAST_WORDS_S
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
        if _is_console(sys._getframe().f_back) or issubclass(kind, KeyboardInterrupt):
            return
        if _has_ended_program(error):
            self._say(error)
            return
        self._reported = text, stack = describe(error)
        where = f" at {stack[0]}" if stack else ""
        self._notes.add(f"it reported {text}{where} to sys.excepthook, and went on")
        if _is_main_thread():
            self._report_error(error)

    def _on_exit(self) -> None:
        error = _cause(sys.exc_info()[1]) or self._uncaught()
        if _is_ending():
            self._say(error)
        else:
            self._report_error(error)

    def _uncaught(self) -> BaseException | None:
        """Return the exception that has ended the main thread; another hook may have kept it to itself."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if not isinstance(error, BaseException) or isinstance(error, KeyboardInterrupt | SystemExit):
            return None
        return error if _has_ended_program(error) or describe(error) == self._reported else None

    def _say(self, error: BaseException | None) -> None:
        if not self._is_said and os.getpid() == self._pid:
            self._is_said = True
            self._report(error, is_certain=True)

    def _report_error(self, error: BaseException | None) -> None:
        now_s = time.monotonic()
        if not self._is_said and os.getpid() == self._pid and now_s - self._words_s >= LAST_WORDS_S:
            self._words_s = now_s
            self._report(error, is_certain=False)

    def _report(self, error: BaseException | None, *, is_certain: bool) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the run ends anyway
            self._report_end(error, is_certain)


def _is_main_thread() -> bool:
    return threading.get_ident() == main_thread_ident()


def _running_frames() -> list[FrameType]:
    """Frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _has_ended_program(error: BaseException) -> bool:
    """Return whether an exception has left the outermost frame of the program, so that Python ends next.

    Under `python -i` a person continues in a console.
    """
    trace = error.__traceback__
    first = trace.tb_frame if trace is not None else None
    if first is None or first.f_back is not None or first.f_code.co_name not in OUTERMOST or not _is_main_thread():
        return False
    return first not in _running_frames() and not (sys.flags.inspect or os.environ.get("PYTHONINSPECT"))


def _is_ending() -> bool:
    """Return whether Python ends, or a child of multiprocessing is done: its `_bootstrap` runs what `atexit` would."""
    frames = _running_frames()
    if not _is_main_thread() or frames[-1].f_code.co_name not in OUTERMOST:
        return _is_main_thread()
    callers = (each.f_code for each in frames if not each.f_code.co_filename.endswith((__file__, FINALIZERS)))
    return next(callers).co_qualname == "BaseProcess._bootstrap"


def _is_console(caller: FrameType | None) -> bool:
    """Return whether a console, pdb's too, has printed an error and continues; at the end no code calls the hook."""
    return caller is not None and caller.f_globals.get("__name__") == "code"


def _cause(error: BaseException | None) -> BaseException | None:
    """Return the exception behind a launcher's sys.exit(1); None behind sys.exit(0)."""
    if not isinstance(error, SystemExit):
        return error
    if error.code in (None, 0):
        return None
    return error.__context__ or error


class ThreadErrors:
    """Notes which threads an exception has ended; the program's own hook is called as before."""

    def __init__(self, notes: ErrorNotes) -> None:
        self._notes = notes
        self._hook: Callable[[Any], object] = threading.excepthook
        threading.excepthook = self._on_exception

    def close(self) -> None:
        if threading.excepthook == self._on_exception:
            threading.excepthook = self._hook

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
        self._notes.add(f"its thread {name!r} was ended by {text}{where}")


def exception_in_flight(ident: int) -> str:
    """Return the exception that a thread handles, or cleans up after, and where it was raised; "" if there is none."""
    error = current_exceptions().get(ident)
    error = error[1] if isinstance(error, tuple) else error  # Python 3.11 gives what exc_info does
    if not isinstance(error, BaseException):
        return ""
    text, stack = read_exception(error)
    return text + (f" (raised at {stack[0]})" if stack else "")


class CrashFile:
    """Has faulthandler write to a file in the dump folder, unless the program uses faulthandler itself.

    It keeps the Python stack of a process that native code ends, as gloo does when more bytes come than a tensor holds.
    A program that enables faulthandler later takes it over, and loses it when this is closed: Python does not say
    which file it writes to.
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
        """Leave the file to the parent, in a forked child."""
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
    """Return what a dead process left: the reason, and its stack, innermost first; empty if nothing."""
    if directory is None:
        return "", ()
    try:
        text = path_of(directory, machine, pid).read_bytes()[:MAX_BYTES].decode(errors="replace")
    except OSError:
        return "", ()
    reason = REASON.search(text)
    main_thread = text.rpartition("hread 0x")[2]  # comes last; the one that crashed may be a thread without Python
    sites = [
        CallSite(file=each["file"], line=int(each["line"]), function=each["function"])
        for each in FRAME.finditer(main_thread)
    ]
    return (reason[1] if reason else ""), readable(sites) if sites else ()
