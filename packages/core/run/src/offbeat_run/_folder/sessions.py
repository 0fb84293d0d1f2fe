"""The sessions of a run: each command that worked on its folder, from when to when, and how it ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

import msgspec

from offbeat_core import OffbeatError, RunFolderError, hide_secrets
from offbeat_run._console.printing import print_text
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.lines import JsonlFile, read_lines

_REASON_CHARACTERS: Final = 300
"""Length of a failure's text kept for the heading of a report; the logs have the rest."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One command that worked on a run.

    Args:
        command: as it was typed.
        started_s: seconds since 1970.
        ended_s: the same; None while it runs, or if its process was killed.
        end: how it ended; "" where `ended_s` is None.
        reason: of a failure, in one line.
    """

    command: str
    started_s: float
    ended_s: float | None = None
    end: Literal["", "finished", "interrupted", "failed", "killed"] = ""
    reason: str = ""


@contextmanager
def record_session(run: RunFolder, command: str) -> Iterator[None]:
    """Write down that a command works on a run while the block lasts, and how the block ended.

    Args:
        run: open for writing.
        command: as it was typed; secrets of the environment in it are replaced by their names.
    """
    before = read_sessions(run, [])
    if before and before[-1].ended_s is None:  # its process is gone: this one holds the lock
        _append(run, {"ended_s": last_written_s(run, before[-1].started_s), "end": "killed"})
    _append(run, {"command": hide_secrets(command), "started_s": round(time.time(), 3)})
    try:
        yield
    except BaseException as error:
        end = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(OffbeatError, OSError):  # the disk may be full, and the user should see the first error
            _append(run, {"ended_s": round(time.time(), 3), "end": end, "reason": _reason(error)})
        raise
    _append(run, {"ended_s": round(time.time(), 3), "end": "finished"})


LENGTH_KEYS: Final = ("engine.max_updates", "data.epochs")
"""Settings that say how long a run of an application is."""


def read_sessions(run: RunFolder, damaged: list[str] | None = None) -> list[Session]:
    """Read the sessions of a run, in order; the run folder of an older version has none.

    Args:
        run: open for reading.
        damaged: takes a text for each line that cannot be read, which is then left out.
    """
    found: list[Session] = []
    for line in read_lines(run.sessions, _checked, "a line of a session", damaged):
        if "started_s" in line:
            found.append(msgspec.convert(line, Session))
        elif found:
            found[-1] = msgspec.structs.replace(found[-1], **line)
    return found


def say_finished(run: RunFolder, done: int, wanted: int) -> bool:
    """Say that a run is at its end, and return whether it is: nothing is left to train, and the last command knew it.

    Args:
        run: open for reading.
        done: updates that its latest checkpoint has.
        wanted: updates that it is to have.
    """
    sessions = read_sessions(run, [])
    if done < wanted or not sessions or sessions[-1].end != "finished":
        return False
    keys = " or ".join(LENGTH_KEYS)
    print_text(f"nothing is left to train: {done} of {wanted} updates are done; to continue, raise {keys}")
    return True


def application_of(run: RunFolder, default: str = "") -> str:
    """Return the name of the application whose run it is: that of its first session, or `default` where it has none."""
    sessions = read_sessions(run, [])
    return sessions[0].command.partition(" ")[0] if sessions else default


def refuse_foreign_run(run: RunFolder, application: str) -> None:
    """Refuse the run of another application, whose settings and checkpoints are of another kind.

    Args:
        run: open for reading.
        application: that would work on it.

    Raises:
        RunFolderError: its first session was another application's.
    """
    first = application_of(run, application)
    if first != application:
        raise RunFolderError(
            f"{run.path}: is a run of {first}, and not of {application}; {first} continues it, and the models are in "
            f"{run.checkpoints.path}"
        )


def last_written_s(run: RunFolder, after_s: float) -> float:
    """Return the time of the last line of a process that is gone, or `after_s` where it wrote none."""
    files = [path for path in (run.metrics, run.timeline, run.alarms) if path.is_file()]
    return max([after_s, *(path.stat().st_mtime for path in files)])


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line that a session can be made of: a start, or an end."""
    msgspec.convert({"command": "", "started_s": 0.0, **line}, Session)
    return {name: line[name] for name in Session.__struct_fields__ if name in line}


def _append(run: RunFolder, line: dict[str, Any]) -> None:
    file = JsonlFile(run.sessions)
    file.write(line)
    file.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return ""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    text = text if isinstance(error, OffbeatError) else f"{type(error).__name__}: {text}"
    return hide_secrets(text)[:_REASON_CHARACTERS]
