"""Who else is in the run, and where their monitors listen: an address book, and four ways in which it is filled.

- `StoreMeeting`: the ranks of a world of torch, through a connection of our own to the job's store (`job_store`), so
  nothing that the main thread does with the store can hold this up.
- `FolderMeeting`: processes outside of torch.distributed, through files in the dump folder.
- `InvitationMeeting`: a process that was started from a watched one, on whatever host, at the monitor of that one. It
  got two environment variables for this; such as a driver and its rollout engines.
- `Peers.learn`: whoever sends a message says where it listens.
"""

import dataclasses
import math
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from offbeat_liveness import _dumps
from offbeat_liveness._network import job_store
from offbeat_liveness._network.job_store import RETRY_S, StoreMeeting, World
from offbeat_liveness._network.side_channel import (
    LOOPBACK,
    Address,
    Answer,
    Listener,
    address_toward,
    ask,
    ask_all,
    is_loopback,
)
from offbeat_liveness._process import flight_recorder
from offbeat_liveness._process.proc import HOST, birth, pid_state
from offbeat_liveness._process.snapshot import from_data

MEETING: Final = "OFFBEAT_LIVENESS_MEETING"
SECRET: Final = "OFFBEAT_LIVENESS_SECRET"
MEET_S: Final = 0.5
RIVAL_S: Final = 0.2
Key = tuple[str, int]


@dataclass(frozen=True)
class Invitation:
    """Where the monitor of the process that started this one listens, and what messages within the run must hold."""

    host: str
    port: int
    secret: str

    def variables(self) -> dict[str, str]:
        return {MEETING: f"{self.host}:{self.port}", SECRET: self.secret}


def read_invitation(environment: Mapping[str, str] = os.environ) -> Invitation | None:
    """The invitation that this process was started with, None without a place or without a secret."""
    host, _, port = environment.get(MEETING, "").rpartition(":")
    secret = environment.get(SECRET, "")
    return Invitation(host, int(port), secret) if host and port.isdecimal() and secret else None


class AddressBook:
    """All processes that are known, and where this one listens.

    Attributes:
        secret: what messages within this run must hold; "" before there is one.
        rank, world_size: of this process; of a rank that the wrapper runs, at first as its environment promises.
        joined: the world of torch that this process is in, or enters; None before.
        invitation: that this process was started with.
        heard: what the inviter has told of others.
    """

    def __init__(self, name: str, answer: Answer) -> None:
        self._name, self._answer = name, answer
        self._listeners: list[Listener] = []  # the last one's address is told
        self._listening = threading.Lock()
        self._book: dict[Key, Address] = {}
        self.heard: dict[Key, Address] = {}
        self.invitation = read_invitation()
        self.secret = self.invitation.secret if self.invitation else ""
        self.joined: World | None = None
        self.rank: int | None
        self._promised, self.rank, self.world_size = job_store.promised_world() or ("", None, 0)

    @property
    def world(self) -> str:
        """Token of the world, the same in all of its processes."""
        return self.joined.name if self.joined else self._promised

    def is_own_world(self, world: str) -> bool:
        """Whether a process that names its world so is of this one; it may not know the newest name yet."""
        own = self.joined.names if self.joined else frozenset()
        return world in own | {self._promised} - {""}

    def add(self, address: Address) -> None:
        self._book[(address.machine, address.pid)] = address

    def known(self) -> dict[Key, Address]:
        """Without what the inviter has told; a copy, since threads add to it."""
        return self._book.copy()

    def drop(self, key: Key) -> None:
        self._book.pop(key, None)

    def me(self) -> Address | None:
        return self._book.get((HOST, os.getpid()))

    def own_name(self) -> str:
        """What verdicts call this process."""
        me = self.me()
        return me.name if me else self._name or f"pid {os.getpid()}"

    def others(self) -> dict[Key, Address]:
        """Everybody known but this process, the lowest first."""
        known = self.known()
        for key, each in self.heard.items():
            if key not in known or known[key].rank is None:
                known[key] = each
        known.pop((HOST, os.getpid()), None)
        known = _without_replaced({key: self._with_own_world_name(each) for key, each in known.items()})
        return dict(sorted(known.items(), key=lambda item: item[1].order))

    def _with_own_world_name(self, address: Address) -> Address:
        """With this process's name for their common world, which the other may call by an older one."""
        return dataclasses.replace(address, world=self.world) if self.is_own_world(address.world) else address

    def running(self) -> dict[Key, Address]:
        """Those of the others that may answer: not the ones of this machine that are seen to be stopped or gone."""
        here = ("runs", "unknown")
        return {
            key: each
            for key, each in self.others().items()
            if each.machine != HOST or pid_state(each.pid, each.born) in here
        }

    def listen(self, host: str = LOOPBACK) -> Listener:
        """Listen; at one more address where others cannot reach those that there are."""
        with self._listening:
            if not is_loopback(host) and host not in {each.host for each in self._listeners}:
                self._open(host)
            elif not self._listeners:
                inviter = self.invitation.host if self.invitation else ""
                self._open(address_toward(inviter, job_store.host_of(None)))
            return self._listeners[-1]

    def _open(self, host: str) -> None:
        self._listeners.append(Listener(host, lambda: self.secret, self._answer))

    def describe(self, listener: Listener) -> Address:
        """The address of this process at one of its listeners."""
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

    def describe_anew(self, listener: Listener) -> Address:
        """`describe`, written down in the book."""
        mine = self.describe(listener)
        self.add(mine)
        return mine

    def introduce(self) -> dict[str, Any]:
        """What to put into a message so that the receiver knows its sender."""
        me = self.me()
        return {"address": asdict(me)} if me else {}

    def unknown_ranks(self) -> set[int]:
        """Ranks of the world that never gave an address."""
        return set(self.joined.missing) if self.joined else set()


def _without_replaced(known: dict[Key, Address]) -> dict[Key, Address]:
    """Without the dead of this machine whose name and rank somebody else has by now."""
    holders = Counter(each.seat for each in known.values())

    def is_replaced(each: Address) -> bool:
        shared = each.seat is not None and holders[each.seat] > 1
        return shared and each.machine == HOST and pid_state(each.pid, each.born) == "gone"

    return {key: each for key, each in known.items() if not is_replaced(each)}


class FolderMeeting:
    """Processes of one machine in no common world, such as a rollouter and a trainer: by files in the dump folder."""

    def __init__(self, book: AddressBook, directory: Path) -> None:
        self._book, self._directory = book, directory

    def join(self) -> None:
        """Write down where this process listens, and read who else did."""
        book, directory = self._book, self._directory
        if not book.secret:
            book.secret = _dumps.shared_secret(directory)
        mine, name = book.describe(book.listen()), _dumps.address_name(HOST, os.getpid())
        if book.me() != mine or not (directory / name).exists():
            book.add(mine)
            _dumps.write(directory, name, asdict(mine))
        for data in _dumps.read_addresses(directory):
            self._take_in(from_data(Address, data))

    def _take_in(self, each: Address) -> None:
        known = self._book.known().get((each.machine, each.pid))
        is_new = each.machine == HOST and (known is None or (known.rank is None and each.rank is not None))
        if not is_new or pid_state(each.pid, each.born) == "gone":  # left over from an earlier run
            return
        self._book.add(each)
        if self._book.joined and each.rank is not None and self._book.is_own_world(each.world):
            self._book.joined.missing.discard(each.rank)

    def close(self) -> None:
        _dumps.remove(self._directory, _dumps.address_name(HOST, os.getpid()))


class InvitationMeeting:
    """Processes that were started from watched ones: the starter's monitor tells each of the others."""

    def __init__(self, book: AddressBook, directory: Path | None) -> None:
        self._book, self._directory = book, directory
        self._told: Address | None = None
        self._again_s = -math.inf
        self._host_answers = True

    def needs_to_meet(self, *, waits_long: bool) -> bool:
        """Whether the process that invited this one is to be told something, or asked for somebody."""
        if self._book.invitation is None or time.monotonic() < self._again_s:
            return False
        return waits_long or self._told is None or self._told != self._book.me()

    def meet(self) -> None:
        """Say where this process listens, and hear of the others; what is known stays if there is no answer."""
        invitation = self._book.invitation
        assert invitation is not None
        mine = self._book.describe_anew(self._book.listen())
        reply = ask(invitation, {"ask": "meet", "address": asdict(mine)}, invitation.secret, MEET_S)
        self._again_s, self._host_answers = time.monotonic() + RETRY_S, reply is not None
        if reply is not None:
            known = [from_data(Address, each) for each in reply.get("addresses", [])]
            self._told, self._book.heard = mine, {(each.machine, each.pid): each for each in known}

    def hear_news(self) -> None:
        """Ask for those who have come since, before a decision on all of them; not where nobody answered lately."""
        if self._book.invitation is not None and self._host_answers:
            self.meet()

    def invite(self, host: str) -> Invitation:
        """Where a process that is started from here meets the others; who was invited passes its invitation on.

        Raises:
            OSError: this process cannot listen at `host`.
        """
        book = self._book
        if book.invitation is not None:
            return book.invitation
        if not book.secret and self._directory is not None:
            book.secret = _dumps.shared_secret(self._directory)
        book.secret = book.secret or secrets.token_hex(16)
        listener = book.listen(host)
        book.describe_anew(listener)
        return Invitation(listener.host, listener.port, book.secret)

    def greet(self, newcomer: Address) -> list[Address]:
        """Take in an invited process, in place of a dead one of its name and rank; returns everybody known here."""
        book, others = self._book, self._book.others()
        others.pop((newcomer.machine, newcomer.pid), None)
        rivals = {key: each for key, each in others.items() if each.seat and each.seat == newcomer.seat}
        for key in rivals.keys() - ask_all(rivals, {"ask": "ping"}, book.secret, RIVAL_S).keys():
            book.drop(key)
        book.add(newcomer)
        me = book.me()
        return [*book.others().values(), *([me] if me else [])]


class Peers(AddressBook):
    """The other processes of the run, as one process knows them.

    Args:
        directory: dump folder, or None.
        name: of this process, "" if it goes by its rank.
        answer: what to say to the other monitors.
    """

    def __init__(self, directory: Path | None, name: str, answer: Answer) -> None:
        super().__init__(name, answer)
        self._by_store = StoreMeeting(self, directory)
        self._by_folder = FolderMeeting(self, directory) if directory is not None else None
        self._by_invitation = InvitationMeeting(self, directory)
        self.invite, self.greet = self._by_invitation.invite, self._by_invitation.greet
        self.hear_news, self.is_meeting = self._by_invitation.hear_news, self._by_store.is_meeting

    @property
    def problem(self) -> str:
        """Why the job's store cannot be read, "" while it can."""
        return self._by_store.problem

    def needs_to_join(self, *, waits_long: bool) -> bool:
        """Whether `keep_joined` has something to do: a world to enter, somebody to find, or a reason to look again."""
        is_new = self._by_folder is not None and self.me() is None
        if self._by_store.needs_to_join() or is_new or self._by_invitation.needs_to_meet(waits_long=waits_long):
            return True
        if self._by_store.is_before_any_world():
            return self._by_store.may_enter_early(waits_long=waits_long)
        return waits_long and (self._by_store.may_read_again() or self._by_folder is not None)

    def is_settled(self) -> bool:
        """Whether looks at the usual pace do: nothing is to be done at once."""
        if self.joined is not None and self.joined.is_in_haste:
            return False
        if self._by_folder is not None and self.me() is None:
            return False
        return not flight_recorder.is_loaded() or self._by_store.is_joined()

    def keep_joined(self, *, waits_long: bool) -> None:
        """Meet the others in every way that there is; called once a tick.

        Args:
            waits_long: the main thread has stood still for a while, maybe in init_process_group.
        """
        self._by_store.join(waits_long=waits_long)
        if self._by_folder is not None:
            self._by_folder.join()
        if self._by_invitation.needs_to_meet(waits_long=waits_long):
            self._by_invitation.meet()

    def learn(self, address: Address) -> None:
        """Take in the sender of a message, unless more is known of it already."""
        known = self.known().get((address.machine, address.pid))
        if known is None or known.rank is None or address.rank is not None:
            self.add(address)
            self._by_store.note_rank(address)

    def close(self) -> None:
        """Stop answering and take the address out of the folder."""
        for listener in self._listeners:
            listener.close()
        if self._by_folder is not None:
            self._by_folder.close()

    def forget(self) -> None:
        """In a forked child: nothing of this belongs to it, least of all the connection to the store."""
        self.joined = None
        for listener in self._listeners:
            listener.forget()
