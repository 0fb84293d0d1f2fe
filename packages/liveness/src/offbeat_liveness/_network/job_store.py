"""The store of the job: found as soon as the main thread tries to enter a world, and read without waiting."""

import contextlib
import os
import sys
from datetime import timedelta
from typing import Any, Final

from offbeat_liveness._process import torch_calls
from offbeat_liveness._process.stacks import main_thread_ident, thread_frames

STORE_TIMEOUT: Final = timedelta(seconds=2)
WORKER: Final = "OFFBEAT_LIVENESS_WORKER"  # pid of the process that the wrapper runs


class Keys:
    """Texts in a store, by rank."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def write(self, rank: int, value: str) -> None:
        """Set one."""
        self._store.set(f"{self._prefix}/{rank}", value)

    def read(self, ranks: set[int]) -> dict[int, str]:
        """Those that are there; all in one request once everybody has come."""
        keys = {rank: f"{self._prefix}/{rank}" for rank in sorted(ranks)}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: text(self._store.get(key)) for rank, key in keys.items()}


def early_world() -> tuple[Any, int, int] | None:
    """The store, rank and size of a world that the main thread is still trying to enter.

    Taken from the arguments of init_process_group on its stack, or from the environment as torchrun sets it. A worker
    that the wrapper runs is known even before it makes that call; its children inherit the variables and do not count.
    """
    call = torch_calls.torch_call(thread_frames().get(main_thread_ident()))
    is_entering = call is not None and call.function == "init_process_group"
    if not is_entering and os.environ.get(WORKER) != str(os.getpid()):
        return None
    arguments = call.arguments if call is not None and is_entering else {}
    rank = _whole(arguments.get("rank"), "RANK")
    size = _whole(arguments.get("world_size"), "WORLD_SIZE")
    if rank is None or size is None:
        return None
    if arguments.get("store") is not None:
        return bottom(arguments["store"]), rank, size
    host, port = _meeting_point(arguments.get("init_method"))
    if not host:
        return None
    tcp_store = sys.modules["torch.distributed"].TCPStore
    with contextlib.suppress(RuntimeError):
        return tcp_store(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT), rank, size
    return None


def bottom(store: Any) -> Any:
    """The store under all prefixes, so that early and late comers use the same keys."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def host_of(store: Any) -> str:
    """The host that the ranks of the world go to, "" where torchrun says that they are all on one."""
    size, local = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    return "" if size and size == local else os.environ.get("MASTER_ADDR", "") or str(getattr(store, "host", ""))


def text(value: Any) -> str:
    """What a store gave, as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _meeting_point(init_method: str | None) -> tuple[str, int]:
    if init_method and init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").partition("?")[0].rpartition(":")
        return host, int(port)
    if init_method and not init_method.startswith("env://"):
        return "", 0
    return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)


def _whole(value: object, variable: str) -> int | None:
    if isinstance(value, int) and value >= 0:
        return value
    said = os.environ.get(variable, "")
    return int(said) if said.isdecimal() else None
