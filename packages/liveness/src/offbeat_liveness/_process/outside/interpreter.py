"""Waits for a person or for the interpreter itself: debuggers, the terminal, imports."""

from types import FrameType
from typing import Final

from offbeat_liveness._process.head import OutsideWait
from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.rule import Look, Rule

DEBUGGERS: Final = (
    "/pdb.py", "/bdb.py", "/cmd.py", "/contextlib.py", "/ipdb/", "/IPython/", "/pydevd", "/_pydev", "/debugpy/",
)  # fmt: skip
IMPORT_FILES: Final = "<frozen importlib"
IMPORTS: Final = ("_find_and_load", "_lock_unlock_module")


def _debugger(frame: FrameType, look: Look) -> OutsideWait | None:
    """The first frame further out that is not the debugger's is the one that it has stopped."""
    for each in look.frames[look.depth :]:
        file = each.f_code.co_filename
        if not any(part in file for part in DEBUGGERS):
            place = f"{file}:{each.f_lineno}"
            return OutsideWait(kind="debugger", text=f"a person: it is stopped in a debugger at {place}", on=place)
    return OutsideWait(kind="debugger", text="a person: it is stopped in a debugger")


def import_wait(look: Look) -> OutsideWait | None:
    """The innermost module that is being imported, and the thread that has begun it where that is another."""
    for frame in look.frames:
        if frame.f_code.co_name in IMPORTS and frame.f_code.co_filename.startswith(IMPORT_FILES):
            name = peek.text(peek.local(frame, "name"))
            owner = peek.attribute(look.local(IMPORT_FILES, "_ModuleLock.acquire", "self"), "owner")
            other = peek.thread_names().get(owner, "") if type(owner) is int else ""
            begun = f", which the thread {other!r} has begun" if other else ""
            return OutsideWait(kind="import", text=f"the import of {name}{begun}", on=name)
    return None


def is_importing(look: Look) -> bool:
    """Whether the innermost frame is one of the import system itself."""
    return look.frames[0].f_code.co_filename.startswith(IMPORT_FILES)


RULES: Final = (
    Rule(file="/bdb.py", functions=("Bdb.trace_dispatch", "Bdb.dispatch_line"), read=_debugger, reach=48),
    Rule(file="/pdb.py", functions=("Pdb.interaction", "Pdb._cmdloop", "Pdb._interaction"), read=_debugger, reach=48),
    Rule(file="/pydevd.py", functions=("PyDB.do_wait_suspend", "PyDB._do_wait_suspend"), read=_debugger, reach=8),
)
