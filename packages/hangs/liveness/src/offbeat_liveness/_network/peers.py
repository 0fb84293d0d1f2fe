"""Other processes of the run, and their monitors' addresses: four ways in which the address book is filled.

- `StoreMeeting`: the ranks of a world of torch, through a connection of our own to the job's store (`job_store`), so
  nothing that the main thread does with the store can hold this up.
- `FolderMeeting`: processes outside of torch.distributed, through files in the dump folder.
- `InvitationMeeting`: a process that was started from a watched one, on whatever host, at the monitor of that one. It
  got two environment variables for this; such as a driver and its rollout engines.
- `Peers.learn`: each sender of a message says where it listens.
"""

import math
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from offbeat_liveness import _dumps
from offbeat_liveness._network.address_book import AddressBook, Invitation
from offbeat_liveness._network.job_store import (
    STORE_TIMEOUT,
    StoreUnreachableError,
    World,
    early_world,
    host_of,
    is_reachable,
    is_wrapped_rank,
    job_of,
)
from offbeat_liveness._network.side_channel import Address, Answer, address_toward, ask, ask_all, is_loopback
from offbeat_liveness._process import flight_recorder, process_groups
from offbeat_liveness._process.proc import HOST, pid_state
from offbeat_liveness._process.process_groups import bottom
from offbeat_liveness._process.snapshot import from_data

SHARED: Final = (
    "the dump folder {directory} is used by another job too ({other}, {job}; this one is {own}): each is "
    "watched by itself, but their dumps are mixed. Give each job its own folder; if they are one run, give both the "
    "same OFFBEAT_LIVENESS_JOB"
)
MEET_S: Final = 0.5
RIVAL_S: Final = 0.2
RETRY_S: Final = 3.0
HELLO_S: Final = 0.5


class StoreMeeting:
    """Ranks of a world of torch: each writes its address into the store of the world, and reads those of the others.

    Attributes:
        problem: why the store cannot be read, "" while it can.
    """

    def __init__(self, book: AddressBook, directory: Path | None) -> None:
        self._book, self._directory = book, directory
        self.problem = ""
        self._not_before_s, self._read_again_s = 0.0, -math.inf
        self._formed_group: Callable[[], Any] = _no_group  # weak, so that a destroyed group closes its connections
        self._joined_group: Callable[[], Any] = _no_group
        self._formed_s = -math.inf

    def is_joined(self) -> bool:
        """Return whether this process has written itself down in the world of its default group."""
        group = process_groups.default_group()
        return group is not None and group is self._joined_group()

    def needs_to_join(self) -> bool:
        """Return whether there is a group to join, or it is time to look for a rank that is missing."""
        group = process_groups.default_group()
        if group is not None and group is not self._joined_group():
            return True
        world = self._book.joined
        return world is not None and world.is_due and time.monotonic() >= self._not_before_s

    def is_before_any_world(self) -> bool:
        is_outside = process_groups.default_group() is None and self._book.joined is None
        return is_outside and flight_recorder.is_loaded()

    def may_enter_early(self, *, waits_long: bool) -> bool:
        """Return whether to look for the store of a world that the main thread is still trying to enter."""
        return time.monotonic() >= self._not_before_s and (waits_long or is_wrapped_rank())

    def may_read_again(self) -> bool:
        """Return whether addresses that were read long ago may be read again."""
        return self._book.joined is not None and time.monotonic() >= self._read_again_s

    def join(self, *, waits_long: bool) -> None:
        """Join as soon as there is a world, and read addresses until all are known."""
        if time.monotonic() < self._not_before_s:
            return
        try:
            self._enter(waits_long=waits_long)
            self._read(waits_long=waits_long)
        except StoreUnreachableError as error:
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
                raise StoreUnreachableError("no process answers where the job's store should be")
            self._publish(store.clone(), int(group.rank()), int(group.size()), is_formed=True)
            self._joined_group = weakref.ref(group)
        elif group is None and self._book.joined is None and (waits_long or is_wrapped_rank()):
            early = early_world() if flight_recorder.is_loaded() else None
            if early is not None:
                self._publish(*early, is_formed=False)

    def _publish(self, store: Any, rank: int, size: int, *, is_formed: bool) -> None:
        """Publish where this process listens, and agree on a secret with the rank that came first."""
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
        """Forget the ranks of an earlier world; one that is in this one as well is found again."""
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
            raise StoreUnreachableError("no process answers any more where the job's store was")
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
        """Take in addresses of this world from the store: those that may be of an earlier one are asked."""
        unsure = {number: each for number, each in enumerate(found) if not world.is_of_now(each)}
        there = ask_all(unsure, {"ask": "ping"}, self._book.secret, HELLO_S)
        for number, each in enumerate(found):
            if number not in unsure or number in there:
                self._forget_rank(each)
                self._book.add(each)
                world.missing.discard(each.rank or 0)

    def _forget_rank(self, newer: Address) -> None:
        """Forget the process that had the same rank in this world before."""
        for key, each in self._book.known().items():
            is_same = each.rank == newer.rank and self._book.is_own_world(each.world)
            if is_same and key != (newer.machine, newer.pid):
                self._book.drop(key)

    def _greet_first(self, world: World) -> None:
        """Introduce this process to rank 0, and learn whether that is of the same world."""
        first = next((each for each in self._book.known().values() if each.rank == 0), None)
        if world.rank == 0 or first is None or not self._book.is_own_world(first.world):
            return
        reply = ask(first, {"ask": "ping", **self._book.introduce()}, self._book.secret, HELLO_S)
        if reply is not None:
            world.confirm(str(reply.get("world", "")))

    def _doubtful(self) -> set[int]:
        """Return ranks whose address leads nowhere: a host may take its own name for loopback, as Debian does."""
        return {each.rank for each in self._ranks_elsewhere() if each.rank is not None and is_loopback(each.host)}

    def _ranks_elsewhere(self) -> list[Address]:
        """Ranks of this world on other hosts."""
        known = [each for each in self._book.known().values() if each.machine != HOST and each.rank is not None]
        return [each for each in known if self._book.is_own_world(each.world)]

    def note_rank(self, address: Address) -> None:
        """Note that a rank of this world is known by a message, or that rank 0 names another world."""
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
        """Return whether the world has formed so lately that an address that is missing says nothing yet."""
        group = process_groups.default_group()
        if group is not None and group is not self._formed_group():
            self._formed_group, self._formed_s = weakref.ref(group), time.monotonic()
        is_missing = bool(self._book.unknown_ranks())
        is_partial = group is not None and (group is not self._joined_group() or is_missing)
        return is_partial and time.monotonic() - self._formed_s < patience_s


def _no_group() -> Any:
    """Stand in for a weak reference before there is a group."""
    return None


class FolderMeeting:
    """Processes of one machine in no common world, such as a rollouter and a trainer: by files in the dump folder.

    Attributes:
        problem: that another job has the same folder, "" while none is seen.
    """

    def __init__(self, book: AddressBook, directory: Path) -> None:
        self._book, self._directory = book, directory
        self.problem = ""

    def join(self) -> None:
        """Publish where this process listens, and read the addresses of the others."""
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
        own = job_of()
        if own and each.job and each.job != own:
            if not self.problem:  # a job may have a thousand ranks
                pid = f"pid {each.pid}"  # also its name before it has a rank
                other = pid if each.name == pid else f"{each.name}, {pid}"
                self.problem = SHARED.format(directory=self._directory, own=own, other=other, job=each.job)
            return
        self._book.add(each)
        if self._book.joined and each.rank is not None and self._book.is_own_world(each.world):
            self._book.joined.missing.discard(each.rank)

    def close(self) -> None:
        _dumps.remove(self._directory, _dumps.address_name(HOST, os.getpid()))


class InvitationMeeting:
    """Processes that were started from watched ones: the starter's monitor gives each the others' addresses."""

    def __init__(self, book: AddressBook, directory: Path | None) -> None:
        self._book, self._directory = book, directory
        self._sent: Address | None = None
        self._again_s = -math.inf
        self._host_answers = True

    def needs_to_meet(self, *, waits_long: bool) -> bool:
        """Return whether the inviter is to be sent this process's address, or asked for those of others."""
        if self._book.invitation is None or time.monotonic() < self._again_s:
            return False
        return waits_long or self._sent is None or self._sent != self._book.me()

    def meet(self) -> None:
        """Send where this process listens, and receive the others' addresses; known ones stay if there is no answer."""
        invitation = self._book.invitation
        assert invitation is not None
        mine = self._book.describe_anew(self._book.listen())
        reply = ask(invitation, {"ask": "meet", "address": asdict(mine)}, invitation.secret, MEET_S)
        self._again_s, self._host_answers = time.monotonic() + RETRY_S, reply is not None
        if reply is not None:
            known = [from_data(Address, each) for each in reply.get("addresses", [])]
            self._sent, self._book.from_inviter = mine, {(each.machine, each.pid): each for each in known}

    def fetch_newcomers(self) -> None:
        """Ask for newcomers before a decision on all processes; not where the inviter did not answer lately."""
        if self._book.invitation is not None and self._host_answers:
            self.meet()

    def invite(self, host: str) -> Invitation:
        """Return where a process started from here meets the others; an invited one passes its own invitation on.

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
        """Take in an invited process, in place of a dead one of its name and rank; return all known processes."""
        book, others = self._book, self._book.others()
        others.pop((newcomer.machine, newcomer.pid), None)
        rivals = {key: each for key, each in others.items() if each.slot and each.slot == newcomer.slot}
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
        self.fetch_newcomers, self.is_meeting = self._by_invitation.fetch_newcomers, self._by_store.is_meeting

    @property
    def problem(self) -> str:
        """Why the job's store cannot be read, "" while it can."""
        return self._by_store.problem

    @property
    def intruders(self) -> str:
        """Say that another job uses the dump folder of this one; "" while none is seen."""
        return self._by_folder.problem if self._by_folder is not None else ""

    def needs_to_join(self, *, waits_long: bool) -> bool:
        """Return whether `keep_joined` has work: a world to enter, a process to find, or a reason to look again."""
        is_new = self._by_folder is not None and self.me() is None
        if self._by_store.needs_to_join() or is_new or self._by_invitation.needs_to_meet(waits_long=waits_long):
            return True
        if self._by_store.is_before_any_world():
            return self._by_store.may_enter_early(waits_long=waits_long)
        return waits_long and (self._by_store.may_read_again() or self._by_folder is not None)

    def is_settled(self) -> bool:
        """Return whether looks at the usual pace suffice: nothing is to be done at once."""
        if self.joined is not None and self.joined.is_in_haste:
            return False
        if self._by_folder is not None and self.me() is None:
            return False
        return not flight_recorder.is_loaded() or self._by_store.is_joined()

    def keep_joined(self, *, waits_long: bool) -> None:
        """Meet the others in every possible way; called once a tick.

        Args:
            waits_long: the main thread has made no progress for a while, maybe in init_process_group.
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
        """Reset a forked child: nothing of this belongs to it, least of all the connection to the store."""
        self.joined = None
        for listener in self._listeners:
            listener.forget()
