"""The store of the job, and the ranks of a world as they have written themselves down in it.

The store is found as soon as the main thread tries to enter a world. Every rank reads the group's own store, so two
worlds over one store do not meet. But the store may outlive its ranks: after a restart torchrun gives the new ones the
same server, and what the old ones wrote is still there. (Each agent counts restarts for itself, so their number means
nothing.) So rank 0 makes a token for each default group it enters, and writes it there; the others take it over, and
write it beside their own entries. An entry with the token is current. One without it may belong to a rank that has not
entered yet, or to one that is long gone: it counts once its owner has answered.
"""

import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

from offbeat_liveness._network.side_channel import Address
from offbeat_liveness._process import process_groups
from offbeat_liveness._process.process_groups import bottom
from offbeat_liveness._process.snapshot import from_data
from offbeat_liveness._process.stacks import main_thread_ident, thread_frames

STORE_TIMEOUT: Final = timedelta(seconds=2)
CONNECT_S: Final = 1.0
# As torch 2.11 to 2.13 name them: init_process_group without a store, and the first group of a process.
WORLD_PREFIX: Final = "default_pg"
FIRST_GROUP: Final = "0"
WORKER: Final = "OFFBEAT_LIVENESS_WORKER"  # pid of the process that the wrapper runs
ORPHAN: Final = "no agent restarts its ranks any more, or ends those that are left"
JOB: Final = "OFFBEAT_LIVENESS_JOB"
PREFIX: Final = "offbeat-liveness"
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 2.0
HASTE_S: Final = 1.0  # in which most have come; pauses grow from then on
RANKS_PER_S: Final = 256  # that may poll the store all the time
RANKS_IN_HASTE_PER_S: Final = 4096


class StoreUnreachableError(OSError):
    """Nothing listens at the address of the job's store."""


class Keys:
    """Texts in a store, under a prefix."""

    def __init__(self, store: Any, prefix: str) -> None:
        self.store, self._prefix = store, prefix

    def set(self, key: str, value: str) -> None:
        self.store.set(f"{self._prefix}/{key}", value)

    def agree(self, key: str, proposed: str) -> str:
        return text(self.store.compare_set(f"{self._prefix}/{key}", "", proposed))

    def count(self, key: str, more: int) -> int:
        """Add to a counter and return it."""
        return int(self.store.add(f"{self._prefix}/{key}", more))

    def get(self, key: str) -> str:
        return self.get_all({0: key}).get(0, "")

    def get_all(self, keys: Mapping[int, str]) -> dict[int, str]:
        """Return those that are there; in two requests if all are."""
        full = {name: f"{self._prefix}/{key}" for name, key in keys.items()}
        if not self.store.check(list(full.values())):
            full = {name: key for name, key in full.items() if self.store.check([key])}
        if not full:
            return {}
        if not self.store.has_extended_api():
            return {name: text(self.store.get(key)) for name, key in full.items()}
        return {name: text(value) for name, value in zip(full, self.store.multi_get(list(full.values())), strict=True)}


def job_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return what distinguishes the job of this process from others that run beside it; "" where nothing does.

    Worlds of one job may have stores of their own, such as a trainer's and its engines', so the store does not.
    """
    known = ((name, environment.get(name, "")) for name in (JOB, "SLURM_JOB_ID", "RAY_JOB_ID", "TORCHELASTIC_RUN_ID"))
    name, value = next(((name, value) for name, value in known if value), ("", ""))
    if (name, value) == ("TORCHELASTIC_RUN_ID", "none"):  # torchrun's default for every run
        value += f" at {environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    return f"{name}={value}" if name else ""


class Launcher:
    """Agent of torchrun that has started this rank: without it the rank is neither restarted nor ended."""

    def __init__(self) -> None:
        is_rank = os.environ.get("RANK", "").isdecimal() and "TORCHELASTIC_RUN_ID" in os.environ
        self._pid = os.getppid() if is_rank else 0

    def problem(self) -> str:
        """Say that the agent is gone; "" while it is there."""
        if self._pid in (0, os.getppid()):
            return ""
        return f"the launcher of rank {os.environ['RANK']} (torchrun, pid {self._pid}) is gone: {ORPHAN}"


def is_wrapped_rank() -> bool:
    """Return whether the wrapper runs this process as a rank; its children inherit the variables and do not count."""
    return os.environ.get(WORKER) == str(os.getpid()) and os.environ.get("RANK", "").isdecimal()


def promised_world() -> tuple[str, int, int] | None:
    """Return, for a rank that the wrapper runs, the world that its environment promises, its rank and the size."""
    variables = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    rank, size = _whole(None, "RANK"), _whole(None, "WORLD_SIZE")
    if not is_wrapped_rank() or rank is None or size is None or not variables[2]:
        return None
    return hashlib.sha256("|".join(variables).encode()).hexdigest()[:8], rank, size


def early_world() -> tuple[Any, int, int] | None:
    """Return the store, rank and size of a world that the main thread is still trying to enter; None if there is none.

    Taken from the arguments of init_process_group on its stack, or from the environment as torchrun sets it: a worker
    that the wrapper runs is known even before it makes that call. The store has the prefix that torch will give it.

    Raises:
        StoreUnreachableError: nothing listens there yet.
    """
    call = process_groups.torch_call(thread_frames().get(main_thread_ident()))
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
    _check_listening(host, port)
    store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    return distributed.PrefixStore(group_prefix, distributed.PrefixStore(WORLD_PREFIX, store)), rank, size


def is_reachable(store: Any) -> bool:
    store = bottom(store)
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    try:
        if host and port:
            _check_listening(host, port)
    except StoreUnreachableError:
        return False
    return True


def _check_listening(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise StoreUnreachableError(
            f"no process answers at {host}:{port}, where the job's store should be: {error}"
        ) from error


def host_of(store: Any) -> str:
    """Return the host that the ranks of the world go to, "" where torchrun says that they are all on one."""
    size, local = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    return "" if size and size == local else os.environ.get("MASTER_ADDR", "") or str(getattr(store, "host", ""))


def text(value: Any) -> str:
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


class World:
    """The store of its world, as one process uses it.

    Args:
        store: a connection of our own, under the prefix of the default group.
        secret: to propose; all use the first one's.
        is_formed: the default group is there, so all ranks are about to enter it; else it is still waited for.

    Attributes:
        secret: what messages within the world are sealed with.
        missing: ranks whose address is not known.
    """

    def __init__(self, store: Any, rank: int, size: int, secret: str, *, is_formed: bool) -> None:
        self.rank, self.size, self.is_formed = rank, size, is_formed
        self._keys = Keys(store, PREFIX)
        self.secret = self._keys.agree("secret", secret)
        self._early = self._keys.agree("world", secrets.token_hex(4))
        self._token = ""
        self._is_confirmed = False
        self._counted: set[str] = set()
        self.missing = set(range(size)) - {rank}
        self._read_all_s = 0.0
        self.begin_anew()
        if is_formed and rank == 0:
            self._token, self._is_confirmed = secrets.token_hex(4), True
            self._keys.set("token", self._token)

    @property
    def name(self) -> str:
        """The same on all ranks of this start of the job."""
        return self._token or self._early

    @property
    def names(self) -> frozenset[str]:
        """All names that a member may use: some may not have the token yet."""
        return frozenset((self._token, self._early)) - {""}

    @property
    def is_unsettled(self) -> bool:
        """Return whether a rank, or the token of rank 0, is still to come."""
        return bool(self.missing) or (self.is_formed and not self._is_confirmed)

    @property
    def is_in_haste(self) -> bool:
        """Return whether to look more often than once a tick."""
        return self.is_unsettled and self._pause_s < LAST_PAUSE_S / 4

    @property
    def is_due(self) -> bool:
        return self.is_unsettled and time.monotonic() >= self._next_s

    def begin_anew(self) -> None:
        """Look at once, and at short intervals: there is a reason to think that something has changed."""
        self._pause_s, self._next_s = max(FIRST_PAUSE_S, self.size / RANKS_IN_HASTE_PER_S), 0.0
        self._hurries_until_s = time.monotonic() + HASTE_S

    def doubt(self) -> None:
        """Note that rank 0 is of another world: the token that was taken over may have been that of an earlier one."""
        if self.rank != 0:
            self._is_confirmed = False
            self.begin_anew()

    def confirm(self, name: str) -> None:
        self._is_confirmed = self._is_confirmed or (bool(self._token) and name == self._token)

    def take_token(self) -> bool:
        """Take over the token of rank 0, return whether it is new. Before the group is there it may be an old one."""
        if self.rank == 0 or not self.is_formed:
            return False
        token = self._keys.get("token")
        is_news = bool(token) and token != self._token
        if is_news:
            self._token, self._is_confirmed = token, False
            self.missing = set(range(self.size)) - {self.rank}
        return is_news

    def write(self, address: Address) -> None:
        """Say where this process listens."""
        self._keys.set(f"address/{self.rank}", json.dumps(asdict(address)))
        if self.name not in self._counted:
            self._counted.add(self.name)
            self._keys.count(f"{self.name}/count", 1)

    def read(self, ranks: set[int], *, now: bool) -> list[Address]:
        """Return addresses of some ranks: once all have come, or after a while, or `now`; [] while it is too early."""
        time_s = time.monotonic()
        self._next_s = time_s + self._pause_s
        slowest_s = max(LAST_PAUSE_S, self.size / RANKS_PER_S)
        if time_s >= self._hurries_until_s:
            self._pause_s = min(2 * self._pause_s, slowest_s)
        has_waited = time_s - self._read_all_s >= slowest_s
        if not ranks or not (now or has_waited or self._keys.count(f"{self.name}/count", 0) >= self.size):
            return []
        self._read_all_s = time_s
        said = self._keys.get_all({rank: f"address/{rank}" for rank in ranks})
        return [from_data(Address, json.loads(text)) for text in said.values()]

    def is_of_now(self, address: Address) -> bool:
        return bool(self._token) and address.world == self._token

    def is_reachable(self) -> bool:
        return is_reachable(self._keys.store)
