"""How a process that is started from a watched one meets it, and all that it knows: by two environment variables.

For processes that share neither a world nor a dump folder, such as a driver and its rollout engines on other hosts.

Who else is in the run, and where their monitors listen.

Addresses are exchanged once, through a connection of our own to the job's store (`world`), so nothing that the main
thread does with the store can hold this up. Processes outside of torch.distributed meet through files in the dump
folder, and at the monitor of the process that started them, on whatever host.
"""

import contextlib
import dataclasses
import math
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_liveness import _dumps
from offbeat_liveness._network import job_store
from offbeat_liveness._network.job_store import World
from offbeat_liveness._network.side_channel import LOOPBACK, Address, Answer, Listener, ask, ask_all
from offbeat_liveness._process import flight_recorder, process_groups
from offbeat_liveness._process.proc import HOST, birth, pid_state
from offbeat_liveness._process.snapshot import from_data

MEETING: Final = "OFFBEAT_LIVENESS_MEETING"
SECRET: Final = "OFFBEAT_LIVENESS_SECRET"
PROBE_PORT: Final = 9


@dataclass(frozen=True)
class Invitation:
    """Where the monitor of the process that started this one listens, and what messages within the run must hold."""

    host: str
    port: int
    secret: str

    def variables(self) -> dict[str, str]:
        """As environment variables."""
        return {MEETING: f"{self.host}:{self.port}", SECRET: self.secret}


def read_invitation(environment: Mapping[str, str] = os.environ) -> Invitation | None:
    """The invitation that this process was started with, None without a place or without a secret."""
    host, _, port = environment.get(MEETING, "").rpartition(":")
    secret = environment.get(SECRET, "")
    return Invitation(host, int(port), secret) if host and port.isdecimal() and secret else None


def is_loopback(host: str) -> bool:
    """Whether only processes of this host get there."""
    return host in ("localhost", "::1") or host.startswith("127.")


def address_toward(*hosts: str) -> str:
    """The address by which this host reaches the first that is another one; loopback if none is."""
    for host in hosts:
        if host and not is_loopback(host):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.connect((host, PROBE_PORT))  # sends nothing: it only chooses a route
                return str(probe.getsockname()[0])
    return LOOPBACK


RETRY_S: Final = 3.0
MEET_S: Final = 0.5
RIVAL_S: Final = 0.2
HELLO_S: Final = 0.5
Key = tuple[str, int]


class Peers:
    """The address book of one process.

    Args:
        directory: dump folder, or None.
        name: of this process, "" if it goes by its rank.
        answer: what to say to the other monitors.
    """

    def __init__(self, directory: Path | None, name: str, answer: Answer) -> None:
        self._directory, self._name, self._answer = directory, name, answer
        self._listeners: list[Listener] = []  # the last one's address is told
        self._listening = threading.Lock()
        self._invitation = read_invitation()
        self._told: Address | None = None
        self._heard: dict[Key, Address] = {}
        self._meet_again_s = self._read_again_s = -math.inf
        self._host_answers = True
        self._secret = self._invitation.secret if self._invitation else ""
        self._not_before_s = 0.0
        self._formed_group: Callable[[], Any] = _no_group  # weak, so that a destroyed group closes its connections
        self._joined_group: Callable[[], Any] = _no_group
        self._formed_s = -math.inf
        self._world: World | None = None
        self._book: dict[Key, Address] = {}
        self.rank: int | None
        self._promised, self.rank, self.world_size = job_store.promised_world() or ("", None, 0)
        self.problem = ""

    @property
    def world(self) -> str:
        """Token of the world, the same in all of its processes."""
        return self._world.name if self._world else self._promised

    @property
    def _world_names(self) -> frozenset[str]:
        """All that members of this world may call it."""
        own = self._world.names if self._world else frozenset()
        return own | {self._promised} - {""}

    def is_own_world(self, world: str) -> bool:
        """Whether a process that names its world so is of this one; it may not know the newest name yet."""
        return world in self._world_names

    def needs_to_join(self, *, waits_long: bool) -> bool:
        """Whether `keep_joined` has something to do: a world to enter, somebody to find, or a reason to look again."""
        group = process_groups.default_group()
        if group is not None and group is not self._joined_group():
            return True
        is_time = time.monotonic() >= self._not_before_s
        if (self._world and self._world.is_due and is_time) or (self._directory is not None and self.me() is None):
            return True
        if self._needs_to_meet(waits_long=waits_long):
            return True
        if group is None and self._world is None and flight_recorder.is_loaded():
            return is_time and (waits_long or job_store.is_wrapped_rank())
        is_again = self._world is not None and time.monotonic() >= self._read_again_s
        return waits_long and (is_again or self._directory is not None)

    def is_settled(self) -> bool:
        """Whether looks at the usual pace do: nothing is to be done at once."""
        if self._world is not None and self._world.is_in_haste:
            return False
        if self._directory is not None and self.me() is None:
            return False
        if not flight_recorder.is_loaded():
            return True
        group = process_groups.default_group()
        return group is not None and group is self._joined_group()

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
                self._read_world(waits_long=waits_long)
            except job_store.NobodyThereError as error:
                self.problem = str(error) if waits_long else ""
                self._not_before_s = time.monotonic() + RETRY_S
            except (RuntimeError, OSError, ValueError) as error:  # the store is gone or not there yet
                self.problem = f"the job's store did not answer: {error}"
                self._not_before_s = time.monotonic() + RETRY_S
        if self._directory is not None:
            self._join_directory(self._directory)
        if self._needs_to_meet(waits_long=waits_long):
            self._meet()

    def invite(self, host: str) -> Invitation:
        """Where a process that is started from here meets the others; who was invited passes its invitation on.

        Raises:
            OSError: this process cannot listen at `host`.
        """
        if self._invitation is not None:
            return self._invitation
        if not self._secret and self._directory is not None:
            self._secret = _dumps.shared_secret(self._directory)
        self._secret = self._secret or secrets.token_hex(16)
        listener = self._listen(host)
        self._add(self._describe(listener))
        return Invitation(listener.host, listener.port, self._secret)

    def greet(self, newcomer: Address) -> list[Address]:
        """Take in somebody who was invited, in place of who had its seat before; everybody that is known here."""
        others = self.others()
        others.pop((newcomer.machine, newcomer.pid), None)
        rivals = {key: each for key, each in others.items() if each.seat and each.seat == newcomer.seat}
        for key in rivals.keys() - ask_all(rivals, {"ask": "ping"}, self._secret, RIVAL_S).keys():
            self._book.pop(key, None)
        self._add(newcomer)
        me = self.me()
        return [*self.others().values(), *([me] if me else [])]

    def introduce(self) -> dict[str, Any]:
        """What to put into a message, so that whoever gets it knows its sender from then on."""
        me = self.me()
        return {"address": asdict(me)} if me else {}

    def learn(self, address: Address) -> None:
        """Take in somebody who has spoken, unless more is known of it already."""
        key = (address.machine, address.pid)
        known = self._book.get(key)
        if known is None or known.rank is None or address.rank is not None:
            self._add(address)
            self._note_rank(address)

    def _note_rank(self, address: Address) -> None:
        """Where a rank of this world has come to be known, or rank 0 speaks of another world."""
        if self._world is None or address.rank is None:
            return
        if self.is_own_world(address.world):
            self._world.missing.discard(address.rank)
            if address.rank == 0:
                self._world.confirm(address.world)
        elif address.rank == 0 and self._world.is_formed:
            self._world.doubt()

    def hear_news(self) -> None:
        """Ask for those who have come since, before a decision on all of them; not where nobody has answered lately."""
        if self._invitation is not None and self._host_answers:
            self._meet()

    def others(self) -> dict[Key, Address]:
        """Everybody known but this process, by machine and pid."""
        known = self._book.copy()  # threads add to it
        for key, each in self._heard.items():
            if key not in known or known[key].rank is None:
                known[key] = each
        known.pop((HOST, os.getpid()), None)
        known = _without_replaced({key: self._in_own_words(each) for key, each in known.items()})
        return dict(sorted(known.items(), key=lambda item: item[1].order))

    def _in_own_words(self, address: Address) -> Address:
        """With the name of this world, where the other process calls it by another."""
        return dataclasses.replace(address, world=self.world) if self.is_own_world(address.world) else address

    def running(self) -> dict[Key, Address]:
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

    def own_name(self) -> str:
        """What verdicts call this process."""
        me = self.me()
        return me.name if me else self._name or f"pid {os.getpid()}"

    def unknown_ranks(self) -> set[int]:
        """Ranks of the world that never gave an address."""
        return set(self._world.missing) if self._world else set()

    def is_meeting(self, patience_s: float) -> bool:
        """Whether the world has formed so lately that an address that is missing says nothing yet."""
        group = process_groups.default_group()
        if group is not None and group is not self._formed_group():
            self._formed_group, self._formed_s = weakref.ref(group), time.monotonic()
        is_partial = group is not None and (group is not self._joined_group() or bool(self.unknown_ranks()))
        return is_partial and time.monotonic() - self._formed_s < patience_s

    def close(self) -> None:
        """Stop answering and take the address out of the folder."""
        for listener in self._listeners:
            listener.close()
        if self._directory is not None:
            _dumps.remove(self._directory, _dumps.address_name(HOST, os.getpid()))

    def forget(self) -> None:
        """In a forked child: nothing of this belongs to it, least of all the connection to the store."""
        self._world = None
        for listener in self._listeners:
            listener.forget()

    def _join_world(self, *, waits_long: bool) -> None:
        group = process_groups.default_group()
        if group is not None and group is not self._joined_group():
            c10d = sys.modules["torch.distributed.distributed_c10d"]
            store = c10d._get_default_store()
            if not job_store.is_reachable(store):  # a new connection would be tried for the store's own timeout
                raise job_store.NobodyThereError("nobody answers where the job's store should be")
            self._publish(store.clone(), int(group.rank()), int(group.size()), is_formed=True)
            self._joined_group = weakref.ref(group)
        elif group is None and self._world is None and (waits_long or job_store.is_wrapped_rank()):
            early = job_store.early_world() if flight_recorder.is_loaded() else None
            if early is not None:
                self._publish(*early, is_formed=False)

    def _publish(self, store: Any, rank: int, size: int, *, is_formed: bool) -> None:
        """Write down where this process listens, and agree on a secret with whoever came first."""
        store.set_timeout(job_store.STORE_TIMEOUT)
        proposed = self._secret or (_dumps.shared_secret(self._directory) if self._directory else "")
        world = World(store, rank, size, proposed or secrets.token_hex(16), is_formed=is_formed)
        world.take_token()
        self._forget_ranks()
        self._secret, self._world = world.secret, world
        self.rank, self.world_size = rank, size
        self._tell_ranks(world, self._listen(address_toward(job_store.host_of(process_groups.bottom(store)))))
        self.problem = ""

    def _forget_ranks(self) -> None:
        """Those of an earlier world; whoever is of this one as well is found again."""
        for key in [key for key, each in self._book.copy().items() if each.rank is not None]:
            self._book.pop(key, None)

    def _tell_ranks(self, world: World, listener: Listener) -> None:
        mine = self._describe(listener)
        self._add(mine)
        world.write(mine)

    def _read_world(self, *, waits_long: bool) -> None:
        """Read addresses; where some are of other hosts, which do not reach this process yet, listen for them too."""
        world = self._world
        waits_long = waits_long and time.monotonic() >= self._read_again_s
        if world is None or not (world.is_due or waits_long):
            return
        if waits_long:
            self._read_again_s = time.monotonic() + RETRY_S
        if not world.is_reachable():
            raise job_store.NobodyThereError("nobody answers any more where the job's store was")
        if world.take_token():
            self._forget_ranks()
            self._tell_ranks(world, self._listeners[-1])
        found = world.read(world.missing | (self._doubtful() if waits_long else set()), now=waits_long)
        self._take_in(world, found)
        me = self.me()
        far = next((each.host for each in self._fellows() if not is_loopback(each.host)), "")
        if me and far and is_loopback(me.host):
            self._tell_ranks(world, self._listen(address_toward(far)))
        self._greet_first(world)

    def _take_in(self, world: World, found: Sequence[Address]) -> None:
        """What was in the store, if it is of now: those that may be of an earlier world are asked."""
        unsure = {number: each for number, each in enumerate(found) if not world.is_of_now(each)}
        there = ask_all(unsure, {"ask": "ping"}, self._secret, HELLO_S)
        for number, each in enumerate(found):
            if number not in unsure or number in there:
                self._forget_rank(each)
                self._add(each)
                world.missing.discard(each.rank or 0)

    def _forget_rank(self, newer: Address) -> None:
        """Whoever had the same rank in this world before is replaced."""
        for key, each in self._book.copy().items():
            if each.rank == newer.rank and self.is_own_world(each.world) and key != (newer.machine, newer.pid):
                self._book.pop(key, None)

    def _greet_first(self, world: World) -> None:
        """Let rank 0 know of this process, and hear whether it is of the same world."""
        first = next((each for each in self._book.copy().values() if each.rank == 0), None)
        if world.rank == 0 or first is None or not self.is_own_world(first.world):
            return
        reply = ask(first, {"ask": "ping", **self.introduce()}, self._secret, HELLO_S)
        if reply is not None:
            world.confirm(str(reply.get("world", "")))

    def _doubtful(self) -> set[int]:
        """Ranks whose address leads nowhere: a host may take its own name for loopback, as Debian does."""
        return {each.rank for each in self._fellows() if each.rank is not None and is_loopback(each.host)}

    def _fellows(self) -> list[Address]:
        """Ranks of this world on other hosts."""
        known = self._book.copy().values()
        return [
            each for each in known if each.machine != HOST and each.rank is not None and self.is_own_world(each.world)
        ]

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
            _dumps.write(directory, _dumps.address_name(HOST, os.getpid()), asdict(mine))
        for data in _dumps.read_addresses(directory):
            each = from_data(Address, data)
            known = self._book.get((each.machine, each.pid))
            is_new = each.machine == HOST and (known is None or (known.rank is None and each.rank is not None))
            if is_new and pid_state(each.pid, each.born) != "gone":  # not left over from an earlier run
                self._add(each)
                if self._world and each.rank is not None and self.is_own_world(each.world):
                    self._world.missing.discard(each.rank)

    def _needs_to_meet(self, *, waits_long: bool) -> bool:
        """Whether the process that invited this one is to be told something, or asked for somebody."""
        if self._invitation is None or time.monotonic() < self._meet_again_s:
            return False
        return waits_long or self._told is None or self._told != self.me()

    def _meet(self) -> None:
        """Say where this process listens, and hear of the others; what is known stays if there is no answer."""
        assert self._invitation is not None
        mine = self._describe(self._listen())
        self._add(mine)
        message = {"ask": "meet", "address": asdict(mine)}
        reply = ask(self._invitation, message, self._invitation.secret, MEET_S)
        self._meet_again_s, self._host_answers = time.monotonic() + RETRY_S, reply is not None
        if reply is not None:
            known = [from_data(Address, each) for each in reply.get("addresses", [])]
            self._told, self._heard = mine, {(each.machine, each.pid): each for each in known}

    def _listen(self, host: str = LOOPBACK) -> Listener:
        """Listen, at one more address where those that there are do not do for others."""
        with self._listening:
            if not is_loopback(host) and host not in {each.host for each in self._listeners}:
                self._open(host)
            elif not self._listeners:
                inviter = self._invitation.host if self._invitation else ""
                self._open(address_toward(inviter, job_store.host_of(None)))
            return self._listeners[-1]

    def _open(self, host: str) -> None:
        self._listeners.append(Listener(host, lambda: self._secret, self._answer))

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


def _no_group() -> Any:
    """Stands for a weak reference before there is a group."""
    return None


def _without_replaced(known: dict[Key, Address]) -> dict[Key, Address]:
    """Without the dead of this machine whose seat somebody else has by now."""
    holders = Counter(each.seat for each in known.values())

    def is_replaced(each: Address) -> bool:
        shared = each.seat is not None and holders[each.seat] > 1
        return shared and each.machine == HOST and pid_state(each.pid, each.born) == "gone"

    return {key: each for key, each in known.items() if not is_replaced(each)}
