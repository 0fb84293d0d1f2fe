"""How many rollout engines a run that goes on is asked to have: a file in its folder, which its driver looks at.

A file needs no port, nobody who may not write to the folder can write it, and it works from every machine that sees the
folder.
"""

import json
import time
from typing import Any, Final

from grpo_async_app._restarts import Tell
from offbeat_run import RunFolder
from offbeat_types import ConfigError, DeadlineError

_ASKED: Final = "scale.json"
TAKEN_AFTER_S: Final = 30.0
"""A driver looks every second; one that does not for so long is not there."""


def ask_for_engines(run: RunFolder, number: int) -> None:
    """Ask the driver of a run for so many rollout engines, and wait until it has taken note.

    Raises:
        ConfigError: less than one.
        DeadlineError: nobody has: the run does not go on.
    """
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


def take_asked_engines(run: RunFolder, tell: Tell) -> int | None:
    """How many rollout engines were asked for since the last call; None when nobody asked.

    Args:
        run: of this driver.
        tell: takes a line when the file holds something else: no reason to end a run.
    """
    path = run.path / _ASKED
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)
    try:
        asked: Any = json.loads(text)
        return max(1, int(asked["engines"]))
    except (ValueError, TypeError, KeyError):
        tell(f'{path}: required {{"engines": N}}, got {text[:80]!r}; use the command `scale`')
        return None
