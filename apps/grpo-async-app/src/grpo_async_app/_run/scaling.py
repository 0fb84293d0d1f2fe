"""Scaling of the rollout engines of a running run: a file in its folder, which its driver looks at.

A file needs no port, only users with write access to the folder can write it, and it works from every machine that sees
the folder.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from offbeat_actors import Notify
from offbeat_core import ConfigError, DeadlineError, UserError
from offbeat_run import RunFolder

_ASKED: Final = "scale.json"
_TAKEN: Final = "scale.taken"
_REFUSED: Final = "scale.refused"
_NOTE_BYTES: Final = 4096
"""A note has about 20; the driver reads no more of any."""
_MOST_ENGINES: Final = 65536
"""As many as `rollout.num_engines` admits."""
_POLL_EVERY_S: Final = 1.0
TAKEN_AFTER_S: Final = 30.0
"""A driver polls every second; one that has not polled for so long is gone."""


def ask_for_engines(run: RunFolder, number: int) -> None:
    """Ask the driver of a run for so many rollout engines, and wait for its answer.

    Raises:
        ConfigError: the number is none that a run may have, or the driver has refused it.
        DeadlineError: no driver has looked at the note.
    """
    if not 1 <= number <= _MOST_ENGINES:
        raise ConfigError(f"--engines {number}: a run needs at least one rollout engine, and at most {_MOST_ENGINES}")
    asked, taken, refused = (run.path / name for name in (_ASKED, _TAKEN, _REFUSED))
    refused.unlink(missing_ok=True)
    run.write_text(asked, json.dumps({"engines": number}))
    end_s = time.monotonic() + TAKEN_AFTER_S
    while asked.exists() or taken.exists():
        if time.monotonic() > end_s:
            asked.unlink(missing_ok=True)
            advice = f"is the run still active? If not: resume {run.path} --rollout.num_engines {number}"
            raise DeadlineError("scale", "the driver of the run", TAKEN_AFTER_S, advice)
        time.sleep(0.1)
    if refused.exists():
        why = refused.read_text()
        refused.unlink(missing_ok=True)
        raise ConfigError(f"--engines {number}: {why}")


async def scale_as_asked(
    run: RunFolder, check: Callable[[int], None], scale: Callable[[int], None], notify: Notify
) -> None:
    """Poll for such a note every second, for as long as the roles run.

    Args:
        run: whose folder takes notes; one from before this call is removed: it asked a driver that is gone.
        check: raises UserError for a number that there is no room for.
        scale: called with each number that was asked for.
        notify: takes a line about what was refused.
    """
    try:
        for name in (_ASKED, _TAKEN, _REFUSED):
            (run.path / name).unlink(missing_ok=True)
        while True:
            if (number := take_asked_engines(run, check, notify)) is not None:
                scale(number)
            await asyncio.sleep(_POLL_EVERY_S)
    except OSError as error:
        notify(f"rollout engines cannot be asked for any more: {error}")


def take_asked_engines(run: RunFolder, check: Callable[[int], None], notify: Notify) -> int | None:
    """Return how many rollout engines were asked for since the last call; None for no note, or one that is refused."""
    taken = run.path / _TAKEN
    try:
        (run.path / _ASKED).replace(taken)  # first of all: what is asked from now on is a note of its own
    except FileNotFoundError:
        return None
    try:
        number = _parse(_read_note(taken))
        if number is None:
            notify(f'{_ASKED}: required {{"engines": N}}, N from 1 to {_MOST_ENGINES}; use the command `scale`')
            return None
        try:
            check(number)
        except UserError as error:
            notify(f"{number} rollout engines are refused: {error}")
            run.write_text(run.path / _REFUSED, str(error))
            return None
        return number
    finally:
        taken.unlink()  # last of all: the command waits for this


def _read_note(path: Path) -> bytes:
    """Return the first bytes of a file; a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _NOTE_BYTES)
    finally:
        os.close(descriptor)


def _parse(note: bytes) -> int | None:
    try:
        number = json.loads(note)["engines"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if isinstance(number, int) and 1 <= number <= _MOST_ENGINES else None
