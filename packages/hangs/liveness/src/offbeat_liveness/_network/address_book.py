"""All processes of the run that one process knows of, and where it listens itself."""

import dataclasses
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from offbeat_liveness._network import job_store
from offbeat_liveness._network.job_store import World
from offbeat_liveness._network.side_channel import LOOPBACK, Address, Answer, Listener, address_toward, is_loopback
from offbeat_liveness._process.proc import HOST, birth, pid_state

MEETING: Final = "OFFBEAT_LIVENESS_MEETING"
SECRET: Final = "OFFBEAT_LIVENESS_SECRET"
Key = tuple[str, int]


@dataclass(frozen=True)
class Invitation:
    """Address of the monitor of the process that started this one, and what messages within the run must hold."""

    host: str
    port: int
    secret: str

    def variables(self) -> dict[str, str]:
        return {MEETING: f"{self.host}:{self.port}", SECRET: self.secret}


def read_invitation(environment: Mapping[str, str] = os.environ) -> Invitation | None:
    """Return the invitation that this process was started with, None without a place or without a secret."""
    host, _, port = environment.get(MEETING, "").rpartition(":")
    secret = environment.get(SECRET, "")
    return Invitation(host, int(port), secret) if host and port.isdecimal() and secret else None


_TAKEN: Final[list[Invitation]] = []
"""The invitation of this process, and of those that are forked from it; one or none."""


def take_invitation() -> Invitation | None:
    """Return the invitation that this process, or the one it is forked from, was started with.

    Its secret is taken out of `os.environ`: the programs that this process starts would inherit it, and any process
    that has it may send this run verdicts.
    """
    invitation = read_invitation()
    os.environ.pop(SECRET, None)
    if invitation is not None:
        _TAKEN[:] = [invitation]
    return _TAKEN[0] if _TAKEN else None


class AddressBook:
    """All processes that are known, and where this one listens.

    Attributes:
        secret: what messages within this run must hold; "" before there is one.
        rank, world_size: of this process; of a rank that the wrapper runs, at first as its environment promises.
        joined: the world of torch that this process is in, or enters; None before.
        invitation: that this process was started with.
        from_inviter: addresses of others that the inviter has sent.
    """

    def __init__(self, name: str, answer: Answer) -> None:
        self._name, self._answer = name, answer
        self._listeners: list[Listener] = []  # the last one's address is given to others
        self._listening = threading.Lock()
        self._book: dict[Key, Address] = {}
        self.from_inviter: dict[Key, Address] = {}
        self.invitation = take_invitation()
        self.secret = self.invitation.secret if self.invitation else ""
        self.joined: World | None = None
        self.rank: int | None
        self._promised, self.rank, self.world_size = job_store.promised_world() or ("", None, 0)

    @property
    def world(self) -> str:
        """Token of the world, the same in all of its processes."""
        return self.joined.name if self.joined else self._promised

    def is_own_world(self, world: str) -> bool:
        """Return whether a process that gives its world this name is in it; it may not know the newest name yet."""
        own = self.joined.names if self.joined else frozenset()
        return world in own | {self._promised} - {""}

    def add(self, address: Address) -> None:
        self._book[(address.machine, address.pid)] = address

    def known(self) -> dict[Key, Address]:
        """Return the addresses but those from the inviter; a copy, since threads add to it."""
        return self._book.copy()

    def drop(self, key: Key) -> None:
        self._book.pop(key, None)

    def me(self) -> Address | None:
        return self._book.get((HOST, os.getpid()))

    def own_name(self) -> str:
        """Return what verdicts call this process."""
        me = self.me()
        return me.name if me else self._name or f"pid {os.getpid()}"

    def others(self) -> dict[Key, Address]:
        """Return all known processes but this one, the lowest first."""
        known = self.known()
        for key, each in self.from_inviter.items():
            if key not in known or known[key].rank is None:
                known[key] = each
        known.pop((HOST, os.getpid()), None)
        known = _without_replaced({key: self._with_own_world_name(each) for key, each in known.items()})
        return dict(sorted(known.items(), key=lambda item: item[1].order))

    def _with_own_world_name(self, address: Address) -> Address:
        """Return an address with this process's name for their common world; the other may use an older one."""
        return dataclasses.replace(address, world=self.world) if self.is_own_world(address.world) else address

    def running(self) -> dict[Key, Address]:
        """Return the other processes that may answer, without those of this machine that are stopped or gone."""
        here = ("runs", "unknown")
        return {
            key: each
            for key, each in self.others().items()
            if each.machine != HOST or pid_state(each.pid, each.born) in here
        }

    def listen(self, host: str = LOOPBACK) -> Listener:
        """Listen; at one more address where others cannot reach the existing ones."""
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
        """Return the address of this process at one of its listeners."""
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
            job=job_store.job_of(),
        )

    def describe_anew(self, listener: Listener) -> Address:
        """`describe`, written down in the book."""
        mine = self.describe(listener)
        self.add(mine)
        return mine

    def introduce(self) -> dict[str, Any]:
        """Return what to put into a message so that the receiver knows its sender."""
        me = self.me()
        return {"address": asdict(me)} if me else {}

    def unknown_ranks(self) -> set[int]:
        """Ranks of the world that never gave an address."""
        return set(self.joined.missing) if self.joined else set()


def _without_replaced(known: dict[Key, Address]) -> dict[Key, Address]:
    """Drop the dead processes of this machine whose name and rank another one has by now."""
    holders = Counter(each.slot for each in known.values())

    def is_replaced(each: Address) -> bool:
        shared = each.slot is not None and holders[each.slot] > 1
        return shared and each.machine == HOST and pid_state(each.pid, each.born) == "gone"

    return {key: each for key, each in known.items() if not is_replaced(each)}
