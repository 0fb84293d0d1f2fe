"""Texts about other processes: their state, command line without secrets, and whether they wait for a reader."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final

from offbeat_liveness._process.outside.kernel_calls import CALLS, link_of, read_proc, syscall_words
from offbeat_liveness._process.proc import state_and_letter

MAX_COMMAND: Final = 80
MAX_THREADS: Final = 16
SECRET: Final = re.compile(r"token(?!iz)|secret|passw|api.?key|authorization|bearer", re.IGNORECASE)
FLAG: Final = re.compile(r"-[\w-]+")
MASK: Final = "***"
STATE_TEXTS: Final = {"stopped": "is stopped", "gone": "is gone", "unknown": "its state is unknown"}


def state_of(pid: int) -> str:
    """Describe what has become of a process; for one that lives, with the letter of its state."""
    state, letter = state_and_letter(pid)
    if state != "runs":
        return STATE_TEXTS[state]
    return f"runs: {letter}" + (", its output fills a pipe that nobody reads" if _waits_for_reader(pid) else "")


def _waits_for_reader(pid: int) -> bool:
    """Return whether a process stands in a write to a pipe: with Popen.wait and PIPE its reader waits for it."""
    return any(each.startswith("pipe:") for each in written_by(pid))


def written_by(pid: int) -> Iterator[str]:
    """Names of what the threads of a process stand in a write to: "pipe:[12]", "socket:[13]", a path."""
    for thread in _threads_of(pid):
        words = syscall_words(f"{pid}/task/{thread}")
        if len(words) > 6 and CALLS.get(words[0]) == "write":
            yield link_of(f"/proc/{pid}/fd/{words[1] & 0xFFFFFFFF}")


def _threads_of(pid: int) -> list[str]:
    """Numbers of the first threads: a queue of multiprocessing writes in one beside the main thread."""
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")[:MAX_THREADS]
    return []


def process_text(pid: int) -> str:
    return f"{command_of(pid)}, {state_of(pid)}"


def command_of(pid: int) -> str:
    """Return the command line of a process, cut short and without secrets; "a process" where it is unknown."""
    words = read_proc(f"/proc/{pid}/cmdline")[: 4 * MAX_COMMAND].replace("\0", " ")
    return cut_short(without_secrets(words)) or "a process"


def without_secrets(command: str) -> str:
    """Return a command line with a mask in place of what looks like a key, since logs are read by many.

    A word that names a secret is masked, and the word after it; of `--token` the word after it alone, of `TOKEN=abc`
    what follows the sign.
    """
    masked, is_secret = [], False
    for word in command.split():
        name, sign, value = word.partition("=")
        names_it = SECRET.search(word) is not None
        if is_secret or (names_it and not sign and not FLAG.fullmatch(word)):
            masked.append(MASK)
        else:
            masked.append(f"{name}={MASK}" if names_it and sign else word)
        is_secret = names_it and (not sign or SECRET.search(value) is not None)
    return " ".join(masked)


def cut_short(words: str) -> str:
    return words if len(words) <= MAX_COMMAND else words[: MAX_COMMAND - 1] + "…"
