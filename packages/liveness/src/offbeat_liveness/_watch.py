"""Turns the monitor on: once per process, and again in forked children."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._monitor import Monitor
from offbeat_liveness._process import ledger, process_groups
from offbeat_liveness._settings import Policy, read_settings

_LOCK: Final = threading.Lock()
_MONITORS: Final[list[Monitor]] = []


def watch(
    stall_after_s: float | None = None,
    policy: Policy | None = None,
    directory: str | Path | None = None,
    *,
    name: str = "",
    on_verdict: Callable[[Verdict], None] | None = None,
) -> Monitor:
    """Watch this process, and together with the others that do so the whole run.

    May be called before init_process_group or without torch at all. A second call returns the first call's monitor,
    unless that was closed. Forked
    children watch themselves with the same settings, under their own rank.

    Args:
        stall_after_s: a wait this long is looked into; default OFFBEAT_STALL_AFTER_S, else 60.
        policy: "report" prints a verdict; "abort" also ends all processes with exit code 4; default
            OFFBEAT_LIVENESS_POLICY, else "report".
        directory: folder for dumps; default OFFBEAT_LIVENESS_DIR, else none are written.
        name: of this process, such as "trainer-0"; by its rank without it.
        on_verdict: called in a thread of the monitor with each verdict, on every process.

    Raises:
        LivenessError: a value is out of range.
    """
    with _LOCK:
        if _MONITORS and not _MONITORS[-1].is_closed:
            return _MONITORS[-1]
        settings = read_settings(stall_after_s, policy, directory, name)
        _MONITORS[:] = [Monitor(settings, on_verdict)]
        return _MONITORS[-1]


def current_monitor() -> Monitor | None:
    """The monitor of this process, None while nobody watches it."""
    return _MONITORS[-1] if _MONITORS and not _MONITORS[-1].is_closed else None


def _watch_child() -> None:
    """In a forked child: the parent's threads, waits and world are not its own."""
    ledger.LEDGER.clear()
    process_groups.disown_world()
    parents = _MONITORS.copy()
    _MONITORS.clear()
    _LOCK._at_fork_reinit()  # type: ignore[attr-defined]
    for monitor in parents:
        monitor.forget()
        if not monitor.is_closed:
            settings = monitor.settings
            _MONITORS.append(Monitor(read_settings(settings.stall_after_s, settings.policy, settings.directory)))


os.register_at_fork(after_in_child=_watch_child)
