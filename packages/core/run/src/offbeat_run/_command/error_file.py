"""The error that ends a command, left in a file for the program that has started it: no text has to be read."""

import contextlib
import json
import os
from pathlib import Path
from typing import Final

from offbeat_core import OffbeatError, hide_secrets, read_small

ERROR_FILE_VARIABLE: Final = "OFFBEAT_ERROR_FILE"
"""Variable of the environment of a command that names the file."""
_MAX_BYTES: Final = 1 << 20
"""Largest error that is read: some lines, and the last ones of the log of a role that has failed."""


def leave_error(error: Exception, exit_code: int) -> None:
    """Write the error and the exit code where the program that has started this command has named a file for them."""
    if not (path := os.environ.get(ERROR_FILE_VARIABLE)):
        return
    left = {
        "classes": [each.__name__ for each in type(error).__mro__ if issubclass(each, Exception)],
        "args": [hide_secrets(each) if isinstance(each, str) else each for each in error.args],
        "text": hide_secrets(str(error)),
        "exit_code": exit_code,
    }
    with contextlib.suppress(OSError):  # that program is gone, and the file's folder with it
        Path(path).write_text(json.dumps(left, default=str))


def load_error(path: Path) -> OffbeatError | None:
    """Return the error that a command has left in the file that `ERROR_FILE_VARIABLE` has named for it.

    Args:
        path: of the file.

    Returns:
        An error with the same text, of the same class or the nearest one above it that this process has loaded; None
        where the command has left none.
    """
    try:
        left = json.loads(read_small(path, _MAX_BYTES))
        names, args, text = list(left["classes"]), list(left["args"]), str(left["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = _classes_from(OffbeatError)
    found = next((known[name] for name in names if name in known), OffbeatError)
    with contextlib.suppress(TypeError, ValueError, AttributeError, LookupError):  # they are those of a class below it
        if str(error := found(*args)) == text:
            return error
    return OffbeatError(text if "OffbeatError" in names else f"{names[0]}: {text}")


def _classes_from(root: type[OffbeatError]) -> dict[str, type[OffbeatError]]:
    found = {root.__name__: root}
    for below in root.__subclasses__():
        found |= _classes_from(below)
    return found
