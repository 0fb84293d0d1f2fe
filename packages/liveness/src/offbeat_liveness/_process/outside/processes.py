"""Waits for other processes of this host: subprocess, multiprocessing, DataLoader workers."""

import itertools
import re
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

from offbeat_liveness._process.head import OutsideWait
from offbeat_liveness._process.kernel.proc import pid_state, state_and_letter
from offbeat_liveness._process.outside import peek
from offbeat_liveness._process.outside.rule import Look, Rule, seconds

MAX_PIDS: Final = 16
MAX_COMMAND: Final = 80
SECRET: Final = re.compile(r"token(?!iz)|secret|passw|api.?key|authorization|bearer", re.IGNORECASE)
FLAG: Final = re.compile(r"-[\w-]+")
MASK: Final = "***"
TOLD: Final = {"stopped": "is stopped", "gone": "is gone", "unknown": "its state is unknown"}


def state_of(pid: int) -> str:
    """What has become of a process, as a text; of one that lives with the letter of its state."""
    state, letter = state_and_letter(pid)
    return f"runs: {letter}" if state == "runs" else TOLD[state]


def command_of(pid: int) -> str:
    """The command line of a process, cut short and without secrets; "a process" where it is not told."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4 * MAX_COMMAND).decode(errors="replace").replace("\0", " ")
    except OSError:
        return "a process"
    return _cut(without_secrets(words)) or "a process"


def without_secrets(command: str) -> str:
    """A command line with a mask in place of what looks like a key, since logs are read by many.

    A word that names a secret is masked, and the word after it; of `--token` the word after it alone, of `TOKEN=abc`
    what follows the sign.
    """
    told, is_secret = [], False
    for word in command.split():
        name, sign, value = word.partition("=")
        names_it = SECRET.search(word) is not None
        if is_secret or (names_it and not sign and not FLAG.fullmatch(word)):
            told.append(MASK)
        else:
            told.append(f"{name}={MASK}" if names_it and sign else word)
        is_secret = names_it and (not sign or SECRET.search(value) is not None)
    return " ".join(told)


def workers(owners: Sequence[object], what: str, *, timeout: object = None, rest: str = "") -> OutsideWait | None:
    """A wait for several processes of multiprocessing.

    Args:
        owners: the Process objects.
        what: they are, in the plural: "DataLoader workers".
        timeout: of the call, seconds.
        rest: what is told besides.
    """
    pids = [pid for pid in map(pid_of, owners) if pid]
    if not pids:
        return None
    gone = [pid for pid in pids if pid_state(pid) == "gone"]
    told = ", ".join(map(str, pids[:MAX_PIDS])) + (", …" if len(pids) > MAX_PIDS else "")
    lost = f" ({', '.join(map(str, gone))} {'is' if len(gone) == 1 else 'are'} gone)" if gone else ""
    noun = what.removesuffix("s") if len(pids) == 1 else what
    number = "pid" if len(pids) == 1 else "pids"
    return OutsideWait(
        kind="process",
        text=f"{len(pids)} {noun}, {number} {told}{lost}{rest}{seconds(timeout)}",
        pid=gone[0] if gone else pids[0],
        timeout_s=peek.number(timeout),
    )


def pid_of(process: object) -> int:
    """Of a Process of multiprocessing; 0 where it has none (not started, or a thread in its place)."""
    return peek.integer(peek.path(process, "_popen.pid")) or 0


def _cut(words: str) -> str:
    return words if len(words) <= MAX_COMMAND else words[: MAX_COMMAND - 1] + "…"


def _popen(frame: FrameType, look: Look) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    pid = peek.integer(peek.attribute(owner, "pid")) or 0
    timeout = peek.local(frame, "timeout")
    if not pid:
        return None
    command = _words(peek.attribute(owner, "args")) or command_of(pid)
    text = f"{command} (pid {pid}, {state_of(pid)}{seconds(timeout)})"
    return OutsideWait(kind="subprocess", text=text, pid=pid, on=command, timeout_s=peek.number(timeout))


def _words(arguments: object) -> str:
    words = [peek.text(arguments)] if type(arguments) not in (list, tuple) else map(peek.text, peek.members(arguments))
    return _cut(without_secrets(" ".join(itertools.takewhile(bool, words))))


def _join(frame: FrameType, look: Look) -> OutsideWait | None:
    process, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    pid, name = pid_of(process), peek.text(peek.attribute(process, "_name"))
    if not pid:
        return None
    text = f"the end of the process {name!r} (pid {pid}, {state_of(pid)}{seconds(timeout)})"
    return OutsideWait(kind="process", text=text, pid=pid, on=name, timeout_s=peek.number(timeout))


def _data_loader(frame: FrameType, look: Look) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    timeout = peek.number(peek.attribute(owner, "_timeout"))
    return workers(peek.members(peek.attribute(owner, "_workers")), "DataLoader workers", timeout=timeout or None)


def _pool(frame: FrameType, look: Look) -> OutsideWait | None:
    """A result of a pool, whose members are `_pool` of the pool; or its end, where `self` is the pool."""
    owner, timeout = peek.local(frame, "self"), peek.local(frame, "timeout")
    pool = peek.attribute(owner, "_pool")
    pool = pool if type(pool) is list else peek.attribute(pool, "_pool")
    found = workers(peek.members(pool), "workers of a multiprocessing.Pool", timeout=timeout)
    return found or _pool_of_threads(peek.members(pool), timeout)


def _pool_of_threads(owners: Sequence[object], timeout: object) -> OutsideWait | None:
    names = [peek.text(peek.attribute(each, "_name")) for each in owners]
    if not any(names):
        return None
    text = f"{len(names)} threads of a pool ({', '.join(names[:4])}){seconds(timeout)}"
    return OutsideWait(kind="thread", text=text, on=names[0], timeout_s=peek.number(timeout))


def _spawned(frame: FrameType, look: Look) -> OutsideWait | None:
    owner = peek.local(frame, "self")
    return workers(peek.members(peek.attribute(owner, "processes")), "processes of torch.multiprocessing.spawn")


def _manager(frame: FrameType, look: Look) -> OutsideWait | None:
    """A call of an object that lives in the process of a manager."""
    owner, method = peek.local(frame, "self"), peek.text(peek.local(frame, "methodname"))
    pid = pid_of(peek.path(owner, "_manager._process"))
    told = f" (pid {pid}, {state_of(pid)})" if pid else ""
    address: Any = peek.path(owner, "_token.address")
    place = peek.text(address) if type(address) is not tuple else f"{peek.text(address[0])}:{address[1]}"
    return OutsideWait(
        kind="process", text=f"{peek.type_name(owner)}.{method} of a manager{told}", pid=pid, address=place
    )


RULES: Final = (
    Rule(
        file="/subprocess.py",
        functions=("Popen.wait", "Popen.communicate", "Popen._wait", "Popen._try_wait", "Popen._communicate"),
        read=_popen,
        reach=4,
    ),
    Rule(file="/multiprocessing/process.py", functions=("BaseProcess.join",), read=_join, reach=6),
    Rule(
        file="/torch/utils/data/dataloader.py",
        functions=("_MultiProcessingDataLoaderIter._try_get_data", "_MultiProcessingDataLoaderIter._get_data"),
        read=_data_loader,
        reach=9,
    ),
    Rule(
        file="/multiprocessing/pool.py",
        functions=("ApplyResult.wait", "ApplyResult.get", "IMapIterator.next", "Pool.join"),
        read=_pool,
        reach=4,
    ),
    Rule(file="/torch/multiprocessing/spawn.py", functions=("ProcessContext.join",), read=_spawned, reach=6),
    Rule(file="/multiprocessing/managers.py", functions=("BaseProxy._callmethod",), read=_manager, reach=8),
)
