"""Failures in an actor's process, reported to its caller: the exception, without pickle, and the end of its log."""

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from offbeat_actors._wire import Failure
from offbeat_core import OffbeatError, PeerFailedError, printable

NUM_TAIL_LINES: Final = 30


def read_log_tail(path: Path, *, num_lines: int = NUM_TAIL_LINES, max_bytes: int = 8192) -> str:
    """Return the last lines of a log, newest last; empty when there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes).decode(errors="replace")  # others write to it meanwhile
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])


_PLAIN = (str, int, float, bool, type(None))


def describe_failure(call_id: int, error: BaseException) -> Failure:
    """Put an exception into plain data, and print its traceback to stderr, which is the role's log."""
    text = "".join(traceback.format_exception(type(error), error, _without_own_frames(error.__traceback__)))
    print(printable(text), end="", file=sys.stderr, flush=True)
    plain = all(isinstance(argument, _PLAIN) for argument in error.args)
    return Failure(
        id=call_id,
        types=[kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BaseException)],
        args=list(error.args) if plain else None,
        text=str(error),
        traceback=text,
    )


def rebuild_failure(failure: Failure, peer: str) -> OffbeatError:
    """Make the exception that the caller sees.

    An offbeat error arrives as the same type with the same text; any other becomes `PeerFailedError`.

    Args:
        failure: what `describe_failure` made in the other process.
        peer: name of the role that raised it.
    """
    known = {kind.__name__: kind for kind in _subclasses(OffbeatError)}
    for name in failure.types:
        kind = known.get(name)
        error = _construct(kind, failure) if kind else None
        if error is not None:
            error.add_note(f"raised in {peer}")
            return error
    reason = f"{failure.types[0]}: {failure.text}" if failure.text else failure.types[0]
    return PeerFailedError(peer, reason, "\n".join(failure.traceback.splitlines()[-NUM_TAIL_LINES:]))


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skip the frames of this package that lead to the role's code."""
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    return frames


def _construct(kind: type[OffbeatError], failure: Failure) -> OffbeatError | None:
    """Rebuild from the args; None when this class cannot be rebuilt to the same text."""
    for args in (failure.args, [failure.text]):
        try:
            error = kind(*args) if args is not None else None
        except TypeError:
            continue
        if error is not None and str(error) == failure.text:
            return error
    return None


def _subclasses(kind: type[OffbeatError]) -> Iterator[type[OffbeatError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
