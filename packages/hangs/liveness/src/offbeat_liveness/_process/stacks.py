"""Stacks of the threads of this process, in the user's frames."""

import dis
import gc
import inspect
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

from offbeat_liveness._process.snapshot import CallSite

T = TypeVar("T")
_NAMES: Final[Any] = vars(ModuleType)["__dict__"]

_LOOKING: Final = threading.RLock()
_COLLECTS_ANYWHERE: Final = sys.version_info < (3, 12)
MAX_FRAMES: Final = 12
OWN_THREADS: Final = "offbeat-liveness"
"""Beginning of the names of the watch's own threads."""
STANDARD_LIBRARY: Final = tuple({sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]})
GENERATED: Final = ("<frozen", "<decorator-gen", "<@beartype")  # code that Python, `decorator` and beartype write
TAKES_ANYTHING: Final = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
MAX_CODES: Final = 10_000  # of one module
GROUPS_OF_OFFBEAT: Final = "offbeat_mesh"  # it stands around torch's collectives, as torch.distributed does
INSTALLED: Final = ("site-packages", "dist-packages")


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames()`: the innermost frame of each thread, by thread ident. Any thread may ask at any time.

    Expected: it returns. What happens up to Python 3.11: it makes objects while it holds the interpreter's lock of
    threads, and where that sets off the garbage collector, what is collected may want that lock again (as a
    `threading.local` does) or hand the GIL to a thread that wants it. Then the whole process deadlocks, for ever
    (python/cpython#106883, not mended in 3.11). So the collector rests meanwhile, for microseconds. Python 3.12
    collects between instructions only. Can go with Python 3.11.

    A program that turns its collector off within those microseconds has it on again: nothing in Python sets the switch
    only if it is as it was.
    """
    return _without_collector(sys._current_frames)


def current_exceptions() -> dict[int, Any]:
    """`sys._current_exceptions()`: what each thread handles, by thread ident; likewise."""
    return _without_collector(sys._current_exceptions)


def _without_collector(look: Callable[[], T]) -> T:
    if not _COLLECTS_ANYWHERE:
        return look()
    with _LOOKING:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return look()
        finally:
            if was_on:
                gc.enable()


if _COLLECTS_ANYWHERE and hasattr(os, "register_at_fork"):
    # Else a child born during a look would have no collector, and a lock that no thread of it will release.
    os.register_at_fork(before=_LOOKING.acquire, after_in_parent=_LOOKING.release, after_in_child=_LOOKING.release)


OWN_FOLDER: Final = str(Path(__file__).parents[1])


class OwnThread(threading.Thread):
    """A thread of the watch: its name says so, and what it has used is not the program's.

    Attributes:
        ended_cpu_s: seconds on a core, of all that have ended.
    """

    ended_cpu_s = 0.0

    def __init__(self, target: Callable[..., object], part: str = "", args: Sequence[object] = ()) -> None:
        name = f"{OWN_THREADS}-{part}" if part else OWN_THREADS
        super().__init__(target=target, name=name, args=tuple(args), daemon=True)

    def run(self) -> None:
        try:
            super().run()
        finally:
            OwnThread.ended_cpu_s += time.thread_time()  # without a lock, which a fork might copy while it is held


def python_threads() -> list[threading.Thread]:
    """Threads that run Python, without the lock of `threading.enumerate`: a thread that stands may hold it."""
    return list(threading._active.copy().values())  # type: ignore[attr-defined]


def thread_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread but those of the watch, by thread ident.

    A frame keeps what its function works on, a layer's weights for one, until all references to it are gone. A thread
    of the watch that held its own would do so in a cycle, with all the others, until the garbage collector runs.
    """
    own = {each.ident or 0 for each in python_threads() if each.name.startswith(OWN_THREADS)}
    frames = current_frames()
    for ident in own & frames.keys():
        del frames[ident]
    return frames


def native_ids() -> dict[int, int]:
    """Return the kernel's number of each of Python's threads, by ident.

    The main thread's is the process's: after os.fork() Python keeps reporting that of the parent (up to 3.12).
    """
    known = {each.ident or 0: each.native_id or 0 for each in python_threads()}
    return known | ({main_thread_ident(): os.getpid()} if sys.platform == "linux" else {})


def own_native_ids() -> frozenset[int]:
    """Return the kernel's numbers of the watch's own threads, and of the one that asks."""
    own = {each.native_id or 0 for each in python_threads() if each.name.startswith(OWN_THREADS)}
    return frozenset(own | {threading.get_native_id()})


def join_own_threads(within_s: float) -> None:
    """Wait for the watch's threads to end, and for those that they start meanwhile.

    One that comes back from torch's own code after Python is gone aborts the process.
    """
    end_s = time.monotonic() + within_s
    while (others := _other_own_threads()) and (left_s := end_s - time.monotonic()) > 0:
        others[0].join(left_s)


def _other_own_threads() -> list[threading.Thread]:
    own = [each for each in python_threads() if each.name.startswith(OWN_THREADS)]
    return [each for each in own if each is not threading.current_thread()]


def stack_of(frame: FrameType | None) -> tuple[CallSite, ...]:
    """Return the frames that a reader can act on, innermost first: no torch, no standard library, nothing of our own.

    A thread that stands in nothing else (a torch thread) is reported with all of its frames.
    """
    sites = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(OWN_FOLDER):
            sites.append(CallSite(file=code.co_filename, line=frame.f_lineno, function=code.co_qualname))
        frame = frame.f_back
    return readable(sites)


def stands_in_torch(frame: FrameType) -> bool:
    """Return whether a thread's innermost frame is torch's, or one of ours around a call of torch's."""
    torch = sys.modules.get("torch")
    folder = os.path.dirname(getattr(torch, "__file__", None) or "")
    return frame.f_code.co_filename.startswith((OWN_FOLDER, folder + os.sep) if folder else OWN_FOLDER)


def readable(sites: list[CallSite]) -> tuple[CallSite, ...]:
    """Leave out what the reader did not write and cannot change, and what only calls another function."""
    chosen = [each for each in sites if not is_machinery(each.file) and not hands_on(each)]
    return tuple((chosen or sites)[:MAX_FRAMES])


def main_thread_ident() -> int:
    return threading.main_thread().ident or 0


@lru_cache(maxsize=4096)
def is_machinery(file: str) -> bool:
    parts = Path(file).parts
    if file.startswith((*GENERATED, OWN_FOLDER)) or GROUPS_OF_OFFBEAT in parts:
        return True
    for folder in INSTALLED:
        if folder in parts:
            return parts[parts.index(folder) + 1].split(".")[0] == "torch"
    return file.startswith(STANDARD_LIBRARY)


def is_own(file: str) -> bool:
    return not is_machinery(file) and not any(folder in Path(file).parts for folder in INSTALLED)


@lru_cache(maxsize=4096)
def hands_on(site: CallSite) -> bool:
    """Return whether a line only calls another function with all that its own was given, `function(*args, **kwargs)`.

    That is what a decorator puts around a function. torch's recorder has names and lines alone, so the code is looked
    for in the module: nothing of it is called, and no file is read.
    """
    name = site.function.rpartition(".")[2]
    return any(_hands_on(code, site.line) for code in _codes_of(site.file) if code.co_name == name)


def _hands_on(code: CodeType, line: int) -> bool:
    if code.co_flags & TAKES_ANYTHING != TAKES_ANYTHING:
        return False
    calls = (each for each in dis.get_instructions(code) if each.opname == "CALL_FUNCTION_EX")
    return any(each.positions is not None and each.positions.lineno == line for each in calls)


@lru_cache(maxsize=256)
def _codes_of(file: str) -> tuple[CodeType, ...]:
    """Code of a file's functions that take anything; of those that are loaded, at module level or in classes."""
    found: list[CodeType] = []
    spaces = [_NAMES.__get__(each) for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
    for space in spaces:
        if space.get("__file__") == file:
            found += _codes_in(list(space.values()), file)
    return tuple(found)


def _codes_in(values: list[Any], file: str) -> Iterator[CodeType]:
    """Yield the code of functions, of the methods of classes, and of functions within functions."""
    seen: set[int] = set()
    while values and len(seen) < MAX_CODES:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is FunctionType:
            values.append(value.__code__)
        elif type(value) is CodeType and value.co_filename == file:
            values += [each for each in value.co_consts if type(each) is CodeType]
            if value.co_flags & TAKES_ANYTHING == TAKES_ANYTHING:
                yield value
        elif issubclass(type(value), type):
            values += [
                each for each in list(type.__dict__["__dict__"].__get__(value).values()) if type(each) is FunctionType
            ]
