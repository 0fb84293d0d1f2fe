"""How many rollout engines a run that goes on is asked to have: a file in its folder, which its driver looks at.

A file needs no port, nobody who may not write to the folder can write it, and it works from every machine that sees the
folder.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Final

from offbeat_actors import Tell
from offbeat_run import RunFolder
from offbeat_types import ConfigError, DeadlineError

_ASKED: Final = "scale.json"
_LOOKED_EVERY_S: Final = 1.0
TAKEN_AFTER_S: Final = 30.0
"""A driver looks every second; one that does not for so long is not there."""


def ask_for_engines(run: RunFolder, number: int) -> None:
    """Ask the driver of a run for so many rollout engines, and wait until it has taken note."""
    if number < 1:
        raise ConfigError(f"--engines {number}: a run needs at least one rollout engine")
    path = run.path / _ASKED
    run.write_text(path, json.dumps({"engines": number}))
    end_s = time.monotonic() + TAKEN_AFTER_S
    while path.exists():
        if time.monotonic() > end_s:
            path.unlink(missing_ok=True)
            advice = f"does the run go on? If not: resume {run.path} --rollout.num_engines {number}"
            raise DeadlineError("scale", "the driver of the run", TAKEN_AFTER_S, advice)
        time.sleep(0.1)


async def scale_as_asked(run: RunFolder, scale: Callable[[int], None], tell: Tell) -> None:
    """Look for such a note every second, for as long as the roles are there."""
    while True:
        try:
            number = take_asked_engines(run, tell)
        except OSError as error:
            tell(f"rollout engines cannot be asked for any more: {error}")
            return
        if number is not None:
            scale(number)
        await asyncio.sleep(_LOOKED_EVERY_S)


def take_asked_engines(run: RunFolder, tell: Tell) -> int | None:
    """How many rollout engines were asked for since the last call; None when nobody asked."""
    path = run.path / _ASKED
    taken = path.with_suffix(".taken")
    try:
        path.replace(taken)  # first of all: what is asked from now on is a note of its own
    except FileNotFoundError:
        return None
    text = taken.read_text()
    taken.unlink()
    try:
        asked: Any = json.loads(text)
        return max(1, int(asked["engines"]))
    except (ValueError, TypeError, KeyError):
        tell(f'{path}: required {{"engines": N}}, got {text[:80]!r}; use the command `scale`')
        return None
