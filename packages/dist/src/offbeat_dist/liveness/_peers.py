"""Who else is in the run, and where their monitors listen.

Addresses are exchanged once, through a connection of our own to the job's store (`store.clone()`), so nothing that the
main thread does with the store can hold this up. Processes outside of torch.distributed meet through files in the dump
folder.
"""

import contextlib
import json
import math
import os
import secrets
import socket
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from offbeat_dist.liveness import _calls, _dumps, _flight_recorder, _world_view
from offbeat_dist.liveness._fates import birth, pid_state
from offbeat_dist.liveness._head import from_data
from offbeat_dist.liveness._side_channel import LOOPBACK, Address, Answer, Listener
from offbeat_dist.liveness._snapshot import HOST
from offbeat_dist.liveness._stacks import main_thread_ident, thread_frames

STORE_TIMEOUT: Final = timedelta(seconds=2)
WORKER: Final = "OFFBEAT_LIVENESS_WORKER"  # pid of the process that the wrapper runs
RETRY_S: Final = 3.0
PREFIX: Final = "offbeat-liveness"


class Peers:
    """The address book of one process.

    Args:
        directory: dump folder, or None.
        name: of this process, "" if it goes by its rank.
        answer: what to say to the other monitors.
    """

    def __init__(self, directory: Path | None, name: str, answer: Answer) -> None:
        self._directory, self._name, self._answer = directory, name, answer
        self._listener: Listener | None = None
        self._secret = ""
        self._world = ""
        self._not_before_s = 0.0
        self._formed_group: Any = None
        self._formed_s = -math.inf
        self._store: Any = None
        self._joined_group: Any = None
        self._missing: set[int] = set()
        self._book: dict[tuple[str, int], Address] = {}
        self.rank: int | None = None
        self.world_size = 0
        self.problem = ""

    @property
    def world(self) -> str:
        """Token of the world, the same in all of its processes."""
        return self._world

    def needs_to_join(self, *, waits_long: bool) -> bool:
        """Whether `keep_joined` has something to do: a world to enter, somebody to find, or a reason to look again."""
        group = _world_view.default_group()
        if group is not None and group is not self._joined_group:
            return True
        if self._missing or (self._directory is not None and self.me() is None):
            return True
        early = group is None and self._store is None and _flight_recorder.is_loaded()
        return waits_long and (early or self._directory is not None)

    def is_settled(self) -> bool:
        """Whether a world, if there may be one, is joined and all of its members are known."""
        if self.needs_to_join(waits_long=False):
            return False
        return self._joined_group is not None or not _flight_recorder.is_loaded()

    @property
    def secret(self) -> str:
        """What messages within this run must hold."""
        return self._secret

    def keep_joined(self, *, waits_long: bool) -> None:
        """Join as soon as there is a world, and read addresses until all are known; called once a tick.

        Args:
            waits_long: the main thread has stood still for a while, maybe in init_process_group.
        """
        if time.monotonic() >= self._not_before_s:
            try:
                self._join_world(waits_long=waits_long)
                self._read_missing()
            except (RuntimeError, OSError, ValueError) as error:  # the store is gone or not there yet
                self.problem = f"the job's store did not answer: {error}"
                self._not_before_s = time.monotonic() + RETRY_S
        if self._directory is not None:
            self._join_directory(self._directory)

    def others(self) -> dict[tuple[str, int], Address]:
        """Everybody known but this process, by machine and pid."""
        me = (HOST, os.getpid())
        return {key: each for key, each in sorted(self._book.items(), key=lambda item: item[1].order) if key != me}

    def running(self) -> dict[tuple[str, int], Address]:
        """Those of the others that may answer: not the ones of this machine that are seen to be stopped or gone."""
        here = ("runs", "unknown")
        return {
            key: each
            for key, each in self.others().items()
            if each.machine != HOST or pid_state(each.pid, each.born) in here
        }

    def me(self) -> Address | None:
        """How the others know this process."""
        return self._book.get((HOST, os.getpid()))

    def unknown_ranks(self) -> set[int]:
        """Ranks of the world that never gave an address."""
        return set(self._missing)

    def is_meeting(self, patience_s: float) -> bool:
        """Whether the world has formed so lately that an address that is missing says nothing yet."""
        group = _world_view.default_group()
        if group is not self._formed_group:
            self._formed_group, self._formed_s = group, time.monotonic()
        is_partial = group is not None and (group is not self._joined_group or bool(self._missing))
        return is_partial and time.monotonic() - self._formed_s < patience_s

    def close(self) -> None:
        """Stop answering and take the address out of the folder."""
        if self._listener:
            self._listener.close()
        if self._directory is not None:
            _dumps.remove(self._directory, _dumps.address_name(HOST, os.getpid()))

    def forget(self) -> None:
        """In a forked child: nothing of this belongs to it."""
        if self._listener:
            self._listener.forget()

    def _join_world(self, *, waits_long: bool) -> None:
        group = _world_view.default_group()
        if group is not None and group is not self._joined_group:
            c10d = sys.modules["torch.distributed.distributed_c10d"]
            self._publish(_bottom(c10d._get_default_store()), int(group.rank()), int(group.size()))
            self._joined_group = group
        elif group is None and waits_long and self._store is None:
            early = _early_world()
            if early is not None:
                self._publish(*early)

    def _publish(self, store: Any, rank: int, size: int) -> None:
        """Write down where this process listens, and agree on a secret with whoever came first."""
        store = store.clone()
        store.set_timeout(STORE_TIMEOUT)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        proposed = _dumps.shared_secret(self._directory) if self._directory else ""
        proposed = proposed or secrets.token_hex(16)
        self._secret = _text(store.compare_set(f"{PREFIX}/{attempt}/secret", "", proposed))
        self._world = _text(store.compare_set(f"{PREFIX}/{attempt}/world", "", secrets.token_hex(4)))
        self.rank, self.world_size = rank, size
        listener = self._listen()
        mine = self._describe(listener)
        store.set(f"{PREFIX}/{attempt}/address/{rank}", json.dumps(asdict(mine)))
        self._store = _Keys(store, f"{PREFIX}/{attempt}/address")
        self._book = {key: each for key, each in self._book.items() if each.rank is None}
        self._add(mine)
        self._missing = set(range(size)) - {rank}
        self.problem = ""

    def _read_missing(self) -> None:
        if self._store is None or not self._missing:
            return
        for rank, text in self._store.read(self._missing).items():
            self._add(from_data(Address, json.loads(text)))
            self._missing.discard(rank)

    def _join_directory(self, directory: Path) -> None:
        """Meet processes that are in no common world, such as a rollouter and a trainer."""
        if not self._secret:
            self._secret = _dumps.shared_secret(directory)
        listener = self._listen()
        mine = self._describe(listener)
        if self._book.get((HOST, os.getpid())) != mine or not _dumps.has(
            directory, _dumps.address_name(HOST, os.getpid())
        ):
            self._add(mine)
            _dumps.write(directory, _dumps.address_name(HOST, os.getpid()), asdict(mine), private=True)
        for data in _dumps.read_addresses(directory):
            each = from_data(Address, data)
            known = self._book.get((each.machine, each.pid))
            is_new = each.machine == HOST and (known is None or (known.rank is None and each.rank is not None))
            if is_new and pid_state(each.pid, each.born) != "gone":  # not left over from an earlier run
                self._add(each)

    def _listen(self) -> Listener:
        if self._listener is None:
            self._listener = Listener(_own_address(), lambda: self._secret, self._answer)
        return self._listener

    def _describe(self, listener: Listener) -> Address:
        name = self._name or (f"rank {self.rank}" if self.rank is not None else f"pid {os.getpid()}")
        return Address(
            host=listener.host,
            port=listener.port,
            machine=HOST,
            pid=os.getpid(),
            born=birth(os.getpid()),
            name=name,
            rank=self.rank,
            world=self.world,
        )

    def _add(self, address: Address) -> None:
        self._book[(address.machine, address.pid)] = address


class _Keys:
    """Addresses in a store, by rank."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def read(self, ranks: set[int]) -> dict[int, str]:
        """Those that are there; all in one request once everybody has come."""
        keys = {rank: f"{self._prefix}/{rank}" for rank in sorted(ranks)}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: _text(self._store.get(key)) for rank, key in keys.items()}


def _early_world() -> tuple[Any, int, int] | None:
    """The store, rank and size of a world that the main thread is still trying to enter.

    Taken from the arguments of init_process_group on its stack, or from the environment as torchrun sets it. A worker
    that the wrapper runs is known even before it makes that call; its children inherit the variables and do not count.
    """
    call = _calls.torch_call(thread_frames().get(main_thread_ident()))
    is_entering = call is not None and call.function == "init_process_group"
    if not is_entering and os.environ.get(WORKER) != str(os.getpid()):
        return None
    arguments = call.arguments if call is not None and is_entering else {}
    rank = _whole(arguments.get("rank"), "RANK")
    size = _whole(arguments.get("world_size"), "WORLD_SIZE")
    if rank is None or size is None:
        return None
    if arguments.get("store") is not None:
        return _bottom(arguments["store"]), rank, size
    host, port = _meeting_point(arguments.get("init_method"))
    if not host:
        return None
    tcp_store = sys.modules["torch.distributed"].TCPStore
    with contextlib.suppress(RuntimeError):
        return tcp_store(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT), rank, size
    return None


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
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def _bottom(store: Any) -> Any:
    """The store under all prefixes, so that early and late comers use the same keys."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _own_address() -> str:
    """Loopback, unless the job spans hosts: then the address by which this host reaches the master."""
    size, local = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    master = os.environ.get("MASTER_ADDR", "")
    if not master or (size and size == local) or master in ("localhost", LOOPBACK, "::1"):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((master, 9))  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])
    return LOOPBACK


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
