"""Tells when this process is about to enter a world of torch.distributed, without importing torch and without a thread.

`init_process_group` finds `rendezvous` and `_new_process_group_helper` among the globals of its module, so these two
are what is replaced: a program that has done `from torch.distributed import init_process_group` before is seen as well.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from offbeat_liveness._process.ledger import LEDGER, Entry

TARGET: Final = "torch.distributed.distributed_c10d"
ENTRIES: Final = ("rendezvous", "_new_process_group_helper")
_CALLS: Final[list[Callable[[], None]]] = []


def before_entering(call: Callable[[], None]) -> None:
    """Have something called in each thread that enters, before it waits for anybody; the last given counts."""
    _CALLS[:] = [call]
    module = sys.modules.get(TARGET)
    if module is not None and all(hasattr(module, name) for name in ENTRIES):
        _hook(module)
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def forget() -> None:
    """Call nothing any more."""
    _CALLS.clear()
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]


def _hook(module: ModuleType) -> None:
    for name in ENTRIES:
        entry = getattr(module, name)
        if not hasattr(entry, "_offbeat_liveness"):
            setattr(module, name, _announcing(entry))


def _announcing(entry: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(entry)
    def enter(*args: Any, **named: Any) -> Any:
        for call in _CALLS.copy():
            call()
        number = LEDGER.enter(Entry(kind="rendezvous", what=entry.__name__))
        try:
            return entry(*args, **named)
        finally:
            LEDGER.leave(number)

    enter._offbeat_liveness = True  # type: ignore[attr-defined]
    return enter


class _Finder(MetaPathFinder):
    """Sees torch.distributed come in, and steps aside."""

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
            _hook(module)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec
