"""The store of the job: found as soon as the main thread tries to enter a world, and read without waiting."""

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from offbeat_liveness._process import torch_calls
from offbeat_liveness._process.process_groups import bottom
from offbeat_liveness._process.stacks import main_thread_ident, thread_frames

STORE_TIMEOUT: Final = timedelta(seconds=2)
CONNECT_S: Final = 1.0
# As torch 2.11 to 2.13 name them: init_process_group without a store, and the first group of a process.
WORLD_PREFIX: Final = "default_pg"
FIRST_GROUP: Final = "0"
WORKER: Final = "OFFBEAT_LIVENESS_WORKER"  # pid of the process that the wrapper runs


class NobodyThereError(OSError):
    """Nothing listens where the job's store should be."""


class Keys:
    """Texts in a store, under a prefix.

    Attributes:
        store: the connection.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self.store, self._prefix = store, prefix

    def set(self, key: str, value: str) -> None:
        """Write one."""
        self.store.set(f"{self._prefix}/{key}", value)

    def agree(self, key: str, proposed: str) -> str:
        """What the first has proposed."""
        return text(self.store.compare_set(f"{self._prefix}/{key}", "", proposed))

    def count(self, key: str, more: int) -> int:
        """Add to a counter; what it is then."""
        return int(self.store.add(f"{self._prefix}/{key}", more))

    def get(self, key: str) -> str:
        """One, "" if it is not there."""
        return self.get_all({0: key}).get(0, "")

    def get_all(self, keys: Mapping[int, str]) -> dict[int, str]:
        """Those that are there; in two requests if all are."""
        full = {name: f"{self._prefix}/{key}" for name, key in keys.items()}
        if not self.store.check(list(full.values())):
            full = {name: key for name, key in full.items() if self.store.check([key])}
        if not full:
            return {}
        if not self.store.has_extended_api():
            return {name: text(self.store.get(key)) for name, key in full.items()}
        return {name: text(value) for name, value in zip(full, self.store.multi_get(list(full.values())), strict=True)}


def is_wrapped_rank() -> bool:
    """Whether the wrapper runs this process as a rank; its children inherit the variables and do not count."""
    return os.environ.get(WORKER) == str(os.getpid()) and os.environ.get("RANK", "").isdecimal()


def promised_world() -> tuple[str, int, int] | None:
    """Of a rank that the wrapper runs: the world that its environment promises, as a text, its rank and the size."""
    variables = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    rank, size = _whole(None, "RANK"), _whole(None, "WORLD_SIZE")
    if not is_wrapped_rank() or rank is None or size is None or not variables[2]:
        return None
    return hashlib.sha256("|".join(variables).encode()).hexdigest()[:8], rank, size


def early_world() -> tuple[Any, int, int] | None:
    """The store, rank and size of a world that the main thread is still trying to enter.

    Taken from the arguments of init_process_group on its stack, or from the environment as torchrun sets it. A worker
    that the wrapper runs is known even before it makes that call. The store has the prefix that torch will give it.

    Raises:
        NobodyThereError: nothing listens there yet.
    """
    call = torch_calls.torch_call(thread_frames().get(main_thread_ident()))
    is_entering = call is not None and call.function == "init_process_group"
    if not is_entering and not is_wrapped_rank():
        return None
    arguments = call.arguments if call is not None and is_entering else {}
    rank = _whole(arguments.get("rank"), "RANK")
    size = _whole(arguments.get("world_size"), "WORLD_SIZE")
    if rank is None or size is None:
        return None
    distributed = sys.modules["torch.distributed"]
    group_prefix = f"{arguments.get('group_name') or FIRST_GROUP}/"
    if arguments.get("store") is not None:
        return distributed.PrefixStore(group_prefix, arguments["store"]).clone(), rank, size
    host, port = _meeting_point(arguments.get("init_method"))
    if not host:
        return None
    _check_somebody_is_at(host, port)
    store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    return distributed.PrefixStore(group_prefix, distributed.PrefixStore(WORLD_PREFIX, store)), rank, size


def is_reachable(store: Any) -> bool:
    """Whether anybody listens where a store is: torch's client would complain on stderr in words of its own."""
    store = bottom(store)
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    try:
        if host and port:
            _check_somebody_is_at(host, port)
    except NobodyThereError:
        return False
    return True


def _check_somebody_is_at(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise NobodyThereError(f"nobody answers at {host}:{port}, where the job's store should be: {error}") from error


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
