"""The ranks of one world, as they have written themselves down in its store.

Every rank reads the group's own store, so two worlds over one store do not meet. But the store may outlive its ranks:
after a restart torchrun gives the new ones the same server, and what the old ones wrote is still there. (Agents count
restarts each for itself, so their number tells nothing.) So rank 0 makes a token for each default group it enters, and
writes it down; the others take it over, and write theirs beside it. What bears the token is of now. What does not may
be of a rank that has not entered yet, or of one that is long gone: it counts once its owner has answered.
"""

import json
import secrets
import time
from dataclasses import asdict
from typing import Any, Final

from offbeat_liveness._network.job_store import Keys, is_reachable
from offbeat_liveness._network.side_channel import Address
from offbeat_liveness._process.head import from_data

PREFIX: Final = "offbeat-liveness"
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 2.0
HASTE_S: Final = 1.0  # in which most have come; pauses grow from then on
RANKS_PER_S: Final = 256  # that may ask the store on and on
RANKS_IN_HASTE_PER_S: Final = 4096


class World:
    """What one process has to do with the store of its world.

    Args:
        store: a connection of our own, under the prefix of the default group.
        rank, size: of this process, and of the world.
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
        """The same on all ranks that are of now."""
        return self._token or self._early

    @property
    def names(self) -> frozenset[str]:
        """All that a member may call it: some may not have the token yet."""
        return frozenset((self._token, self._early)) - {""}

    @property
    def is_unsettled(self) -> bool:
        """Whether somebody, or the word of rank 0, is still to come."""
        return bool(self.missing) or (self.is_formed and not self._is_confirmed)

    @property
    def is_in_haste(self) -> bool:
        """Whether it is worth looking more often than once a tick."""
        return self.is_unsettled and self._pause_s < LAST_PAUSE_S / 4

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self.is_unsettled and time.monotonic() >= self._next_s

    def begin_anew(self) -> None:
        """Look at once, and at short intervals: there is a reason to think that something has changed."""
        self._pause_s, self._next_s = max(FIRST_PAUSE_S, self.size / RANKS_IN_HASTE_PER_S), 0.0
        self._hurries_until_s = time.monotonic() + HASTE_S

    def doubt(self) -> None:
        """Rank 0 speaks of another world: its token may have been that of an earlier one."""
        if self.rank != 0:
            self._is_confirmed = False
            self.begin_anew()

    def confirm(self, name: str) -> None:
        """Rank 0 has said of what world it is."""
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
        """Whether an address in the store was written by a member of this very world."""
        return bool(self._token) and address.world == self._token

    def is_reachable(self) -> bool:
        """Whether anybody listens where the store is."""
        return is_reachable(self._keys.store)
