"""Turns the monitor on: once per process; in forked children as soon as they enter a world or declare a wait.

That a process is about to enter a world is seen without importing torch and without a thread: `init_process_group`
finds `rendezvous` and `_new_process_group_helper` among the globals of its module, so these two are what is replaced.
"""

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from offbeat_liveness._announcer import say
from offbeat_liveness._diagnosis.verdict import Verdict
from offbeat_liveness._monitor import Monitor
from offbeat_liveness._network.address_book import take_invitation
from offbeat_liveness._process import ledger, process_groups
from offbeat_liveness._process.ledger import LEDGER, Entry
from offbeat_liveness._settings import Policy, Settings, read_settings

TARGET: Final = "torch.distributed.distributed_c10d"
WORLD_CALLS: Final = ("rendezvous", "_new_process_group_helper")
_BEFORE_WORLD: Final[list[Callable[[], None]]] = []
_LOCK: Final = threading.Lock()
_MONITORS: Final[list[Monitor]] = []
_PENDING: Final[list[Settings]] = []
"""Settings of a watch that begins when there is something to see."""


def call_before_entering_world(call: Callable[[], None]) -> None:
    """Have something called in each thread that enters, before it waits for anybody; the last given counts."""
    _BEFORE_WORLD[:] = [call]
    module = sys.modules.get(TARGET)
    if module is not None and all(hasattr(module, name) for name in WORLD_CALLS):
        _hook_world_calls(module)
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def stop_calling_before_world() -> None:
    _BEFORE_WORLD.clear()
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]


def _hook_world_calls(module: ModuleType) -> None:
    for name in WORLD_CALLS:
        entry = getattr(module, name)
        if not hasattr(entry, "_offbeat_liveness"):
            setattr(module, name, _announcing(entry))


def _announcing(entry: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(entry)
    def enter(*args: Any, **named: Any) -> Any:
        for call in _BEFORE_WORLD.copy():
            call()
        return LEDGER.during(Entry(kind="rendezvous", what=entry.__name__), entry, *args, **named)

    enter._offbeat_liveness = True  # type: ignore[attr-defined]
    return enter


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the others would, and hook it once it is loaded."""
        if name != TARGET:
            return None
        sys.meta_path[:] = [each for each in sys.meta_path if each is not self]
        found = (each.find_spec(name, path, target) for each in list(sys.meta_path))
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            _hook_world_calls(module)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


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
    unless that was closed. Forked children watch themselves with the same settings, under their own rank, from when
    they enter a world or declare a wait: until then there is no thread, file or socket for them, since most are workers
    of a data loader or a pool.

    Args:
        stall_after_s: a wait this long is looked into; default OFFBEAT_STALL_AFTER_S, else 60.
        policy: "report" says what is stuck; "abort" also ends this process with exit code 4 on a proof, and on a
            suspicion once the timeout of what is waited in is over; "replace" does too, but waits for that timeout
            where another process has ended, which will be replaced; "strict" on a suspicion too. Default
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
        _be_pending(None)
        _MONITORS[:] = [Monitor(settings, on_verdict)]
        call_before_entering_world(ledger.watch_torch_calls)  # the monitor's next look comes after the first waits
        return _MONITORS[-1]


def watch_if_invited(name: str) -> Monitor | None:
    """Watch this process if a watched one has started it with an invitation; the way of roles and engines.

    A monitor that came with a fork from another process is closed. The invitation's secret is taken out of
    `os.environ`, so that programs which this process starts do not get it.

    Args:
        name: of this process, such as "rollout-0".

    Returns:
        None where no process has invited this one.
    """
    if take_invitation() is None:
        return None
    known = current_monitor()
    if known is not None and known.settings.name != name:
        known.close()
    return watch(name=name)


def watch_when_needed(settings: Settings) -> None:
    """Watch this process from when it enters a world or declares a wait, unless it is watched already."""
    with _LOCK:
        if not _MONITORS or _MONITORS[-1].is_closed:
            _be_pending(settings)


def _be_pending(settings: Settings | None) -> None:
    _PENDING[:] = [settings] if settings else []
    ledger.before_wait(_begin if settings else None)
    if settings:
        call_before_entering_world(_begin)
    else:
        stop_calling_before_world()


def _begin() -> None:
    """There is something to see now; of several threads that come at once, the first begins and the others wait."""
    with _LOCK:
        if _PENDING:
            settings = _PENDING[0]
            _be_pending(None)
            try:
                _MONITORS[:] = [Monitor(settings)]
            except (OSError, RuntimeError) as error:  # no thread to be had: the program continues without us
                say(f"offbeat liveness: pid {os.getpid()} is not watched: {error}")


def current_monitor() -> Monitor | None:
    """Return the monitor of this process, None while it is not watched."""
    return _MONITORS[-1] if _MONITORS and not _MONITORS[-1].is_closed else None


def _watch_child() -> None:
    """Reset a forked child: the parent's threads, waits and world are not its own."""
    ledger.LEDGER.clear()
    process_groups.disown_world()
    parents = _MONITORS.copy()
    _MONITORS.clear()
    _LOCK._at_fork_reinit()  # type: ignore[attr-defined]
    pending = _PENDING[0] if _PENDING else None
    for monitor in parents:
        if not monitor.is_closed:
            pending = dataclasses.replace(monitor.settings, name="")
        monitor.forget()
    _be_pending(pending)


os.register_at_fork(after_in_child=_watch_child)
