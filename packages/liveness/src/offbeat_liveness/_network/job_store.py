"""The store of the job, and the ranks of a world as they have written themselves down in it.

The store is found as soon as the main thread tries to enter a world. Every rank reads the group's own store, so two
worlds over one store do not meet. But the store may outlive its ranks: after a restart torchrun gives the new ones the
same server, and what the old ones wrote is still there. (Agents count restarts each for itself, so their number tells
nothing.) So rank 0 makes a token for each default group it enters, and writes it down; the others take it over, and
write theirs beside it. What bears the token is of now. What does not may be of a rank that has not entered yet, or of
one that is long gone: it counts once its owner has answered.
"""

import hashlib
import json
import math
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat_liveness import _dumps
from offbeat_liveness._network.side_channel import Address, address_toward, ask, ask_all, is_loopback
from offbeat_liveness._process import flight_recorder, process_groups
from offbeat_liveness._process.proc import HOST
from offbeat_liveness._process.process_groups import bottom
from offbeat_liveness._process.snapshot import from_data
from offbeat_liveness._process.stacks import main_thread_ident, thread_frames

if TYPE_CHECKING:
    from offbeat_liveness._network.peers import AddressBook

STORE_TIMEOUT: Final = timedelta(seconds=2)
CONNECT_S: Final = 1.0
# As torch 2.11 to 2.13 name them: init_process_group without a store, and the first group of a process.
WORLD_PREFIX: Final = "default_pg"
FIRST_GROUP: Final = "0"
WORKER: Final = "OFFBEAT_LIVENESS_WORKER"  # pid of the process that the wrapper runs
PREFIX: Final = "offbeat-liveness"
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 2.0
HASTE_S: Final = 1.0  # in which most have come; pauses grow from then on
RANKS_PER_S: Final = 256  # that may ask the store on and on
RANKS_IN_HASTE_PER_S: Final = 4096
RETRY_S: Final = 3.0
HELLO_S: Final = 0.5


class NobodyThereError(OSError):
    """Nothing listens where the job's store should be."""


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
    """The store, rank and size of a world that the main thread is still trying to enter; None if there is none.

    Taken from the arguments of init_process_group on its stack, or from the environment as torchrun sets it: a worker
    that the wrapper runs is known even before it makes that call. The store has the prefix that torch will give it.

    Raises:
        NobodyThereError: nothing listens there yet.
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
    _check_somebody_is_at(host, port)
    store = distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    return distributed.PrefixStore(group_prefix, distributed.PrefixStore(WORLD_PREFIX, store)), rank, size


def is_reachable(store: Any) -> bool:
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
        secret: to propose; the first one's is everybody's.
        is_formed: the default group is there, so everybody is about to enter it; else it is still waited for.

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
        """Whether a rank, or the token of rank 0, is still to come."""
        return bool(self.missing) or (self.is_formed and not self._is_confirmed)

    @property
    def is_in_haste(self) -> bool:
        """Whether it is worth looking more often than once a tick."""
        return self.is_unsettled and self._pause_s < LAST_PAUSE_S / 4

    @property
    def is_due(self) -> bool:
        return self.is_unsettled and time.monotonic() >= self._next_s

    def begin_anew(self) -> None:
        """Look at once, and at short intervals: there is a reason to think that something has changed."""
        self._pause_s, self._next_s = max(FIRST_PAUSE_S, self.size / RANKS_IN_HASTE_PER_S), 0.0
        self._hurries_until_s = time.monotonic() + HASTE_S

    def doubt(self) -> None:
        """Rank 0 is of another world: the token that was taken over may have been that of an earlier one."""
        if self.rank != 0:
            self._is_confirmed = False
            self.begin_anew()

    def confirm(self, name: str) -> None:
        self._is_confirmed = self._is_confirmed or (bool(self._token) and name == self._token)

    def take_token(self) -> bool:
        """Take over what rank 0 has written; whether that is news. Before the group is there it may be an old one."""
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
        """Addresses of some ranks: once all have come, or after a while, or `now`; [] while it is too early."""
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


class StoreMeeting:
    """Ranks of a world of torch: each writes its address into the store of the world, and reads those of the others.

    Attributes:
        problem: why the store cannot be read, "" while it can.
    """

    def __init__(self, book: "AddressBook", directory: Path | None) -> None:
        self._book, self._directory = book, directory
        self.problem = ""
        self._not_before_s, self._read_again_s = 0.0, -math.inf
        self._formed_group: Callable[[], Any] = _no_group  # weak, so that a destroyed group closes its connections
        self._joined_group: Callable[[], Any] = _no_group
        self._formed_s = -math.inf

    def is_joined(self) -> bool:
        """Whether this process has written itself down in the world of its default group."""
        group = process_groups.default_group()
        return group is not None and group is self._joined_group()

    def needs_to_join(self) -> bool:
        """Whether there is a group to join, or it is time to look for somebody who is missing."""
        group = process_groups.default_group()
        if group is not None and group is not self._joined_group():
            return True
        world = self._book.joined
        return world is not None and world.is_due and time.monotonic() >= self._not_before_s

    def is_before_any_world(self) -> bool:
        is_outside = process_groups.default_group() is None and self._book.joined is None
        return is_outside and flight_recorder.is_loaded()

    def may_enter_early(self, *, waits_long: bool) -> bool:
        """Whether to look for the store of a world that the main thread is still trying to enter."""
        return time.monotonic() >= self._not_before_s and (waits_long or is_wrapped_rank())

    def may_read_again(self) -> bool:
        """Whether addresses that were read long ago may be read again."""
        return self._book.joined is not None and time.monotonic() >= self._read_again_s

    def join(self, *, waits_long: bool) -> None:
        """Join as soon as there is a world, and read addresses until all are known."""
        if time.monotonic() < self._not_before_s:
            return
        try:
            self._enter(waits_long=waits_long)
            self._read(waits_long=waits_long)
        except NobodyThereError as error:
            self.problem = str(error) if waits_long else ""
            self._not_before_s = time.monotonic() + RETRY_S
        except (RuntimeError, OSError, ValueError) as error:  # the store is gone or not there yet
            self.problem = f"the job's store did not answer: {error}"
            self._not_before_s = time.monotonic() + RETRY_S

    def _enter(self, *, waits_long: bool) -> None:
        group = process_groups.default_group()
        if group is not None and group is not self._joined_group():
            c10d = sys.modules["torch.distributed.distributed_c10d"]
            store = c10d._get_default_store()
            if not is_reachable(store):  # a new connection would be tried for the store's own timeout
                raise NobodyThereError("nobody answers where the job's store should be")
            self._publish(store.clone(), int(group.rank()), int(group.size()), is_formed=True)
            self._joined_group = weakref.ref(group)
        elif group is None and self._book.joined is None and (waits_long or is_wrapped_rank()):
            early = early_world() if flight_recorder.is_loaded() else None
            if early is not None:
                self._publish(*early, is_formed=False)

    def _publish(self, store: Any, rank: int, size: int, *, is_formed: bool) -> None:
        """Write down where this process listens, and agree on a secret with whoever came first."""
        book = self._book
        store.set_timeout(STORE_TIMEOUT)
        proposed = book.secret or (_dumps.shared_secret(self._directory) if self._directory else "")
        world = World(store, rank, size, proposed or secrets.token_hex(16), is_formed=is_formed)
        world.take_token()
        self._forget_ranks()
        book.secret, book.joined = world.secret, world
        book.rank, book.world_size = rank, size
        listener = book.listen(address_toward(host_of(bottom(store))))
        world.write(book.describe_anew(listener))
        self.problem = ""

    def _forget_ranks(self) -> None:
        """Those of an earlier world; whoever is of this one as well is found again."""
        for key, each in self._book.known().items():
            if each.rank is not None:
                self._book.drop(key)

    def _read(self, *, waits_long: bool) -> None:
        """Read addresses; where some are of other hosts, which do not reach this process yet, listen for them too."""
        book, world = self._book, self._book.joined
        waits_long = waits_long and time.monotonic() >= self._read_again_s
        if world is None or not (world.is_due or waits_long):
            return
        if waits_long:
            self._read_again_s = time.monotonic() + RETRY_S
        if not world.is_reachable():
            raise NobodyThereError("nobody answers any more where the job's store was")
        if world.take_token():
            self._forget_ranks()
            world.write(book.describe_anew(book.listen()))
        found = world.read(world.missing | (self._doubtful() if waits_long else set()), now=waits_long)
        self._take_in(world, found)
        me = book.me()
        far = next((each.host for each in self._ranks_elsewhere() if not is_loopback(each.host)), "")
        if me and far and is_loopback(me.host):
            world.write(book.describe_anew(book.listen(address_toward(far))))
        self._greet_first(world)

    def _take_in(self, world: World, found: Sequence[Address]) -> None:
        """What was in the store, if it is of this world: those that may be of an earlier one are asked."""
        unsure = {number: each for number, each in enumerate(found) if not world.is_of_now(each)}
        there = ask_all(unsure, {"ask": "ping"}, self._book.secret, HELLO_S)
        for number, each in enumerate(found):
            if number not in unsure or number in there:
                self._forget_rank(each)
                self._book.add(each)
                world.missing.discard(each.rank or 0)

    def _forget_rank(self, newer: Address) -> None:
        """Whoever had the same rank in this world before is replaced."""
        for key, each in self._book.known().items():
            is_same = each.rank == newer.rank and self._book.is_own_world(each.world)
            if is_same and key != (newer.machine, newer.pid):
                self._book.drop(key)

    def _greet_first(self, world: World) -> None:
        """Let rank 0 know of this process, and hear whether it is of the same world."""
        first = next((each for each in self._book.known().values() if each.rank == 0), None)
        if world.rank == 0 or first is None or not self._book.is_own_world(first.world):
            return
        reply = ask(first, {"ask": "ping", **self._book.introduce()}, self._book.secret, HELLO_S)
        if reply is not None:
            world.confirm(str(reply.get("world", "")))

    def _doubtful(self) -> set[int]:
        """Ranks whose address leads nowhere: a host may take its own name for loopback, as Debian does."""
        return {each.rank for each in self._ranks_elsewhere() if each.rank is not None and is_loopback(each.host)}

    def _ranks_elsewhere(self) -> list[Address]:
        """Ranks of this world on other hosts."""
        known = [each for each in self._book.known().values() if each.machine != HOST and each.rank is not None]
        return [each for each in known if self._book.is_own_world(each.world)]

    def note_rank(self, address: Address) -> None:
        """A rank of this world has come to be known by a message, or rank 0 speaks of another world."""
        world = self._book.joined
        if world is None or address.rank is None:
            return
        if self._book.is_own_world(address.world):
            world.missing.discard(address.rank)
            if address.rank == 0:
                world.confirm(address.world)
        elif address.rank == 0 and world.is_formed:
            world.doubt()

    def is_meeting(self, patience_s: float) -> bool:
        """Whether the world has formed so lately that an address that is missing says nothing yet."""
        group = process_groups.default_group()
        if group is not None and group is not self._formed_group():
            self._formed_group, self._formed_s = weakref.ref(group), time.monotonic()
        is_missing = bool(self._book.unknown_ranks())
        is_partial = group is not None and (group is not self._joined_group() or is_missing)
        return is_partial and time.monotonic() - self._formed_s < patience_s


def _no_group() -> Any:
    """Stands for a weak reference before there is a group."""
    return None
