"""What a group does with plain data.

Every collective form begins with an exchange of short headers between all members. It carries short data along, and
it proves that the members are in the same call: if one came to another, all of them raise `MismatchError`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from offbeat_mesh._calls import Calls
from offbeat_mesh._exchange import Exchange
from offbeat_mesh._news import one_line
from offbeat_mesh._wire import Plain, decode, encode
from offbeat_types import GroupError, MismatchError, PeerFailedError

T = TypeVar("T")

VALUE_CHARS = 120
"""Of each value that a disagreement shows."""


class DataGroup:
    """The plain-data half of `Group`.

    Plain data: None, bool, int of 64 bit, float, str, bytes, list, dict with str keys, numpy array. Never pickle.
    """

    def __init__(self, calls: Calls, control: dist.ProcessGroup | None) -> None:
        self._calls = calls
        self._exchange = Exchange(calls, control)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in the group's order."""
        return self._calls.ranks

    @property
    def size(self) -> int:
        """How many members."""
        return self._exchange.size

    @property
    def rank(self) -> int:
        """Which of them this process is: group-relative, never global."""
        return self._exchange.rank

    def broadcast_data(self, value: Plain = None, source: int = 0, *, deadline_s: float | None = None) -> Plain:
        """The source's value, on all members.

        Args:
            value: plain data; looked at on the source alone.
            source: group-relative.
            deadline_s: for the members to come; None takes the group's.
        """
        with self._calls.call("broadcast_data", deadline_s):
            self._check_member("source", source)
            payload = encode(value, what="the value to broadcast") if self.rank == source else b""
            headers = self._exchange.agree("broadcast_data", source, payload)
            return decode(self._exchange.share(headers[source], payload, source))

    def all_gather_data(self, value: Plain, *, deadline_s: float | None = None) -> list[Plain]:
        """Every member's value, by group rank, on all members."""
        with self._calls.call("all_gather_data", deadline_s):
            return self._all_gather("all_gather_data", value)

    def gather_data(self, value: Plain, destination: int = 0, *, deadline_s: float | None = None) -> list[Plain] | None:
        """Every member's value, by group rank, on the destination; None on the others."""
        with self._calls.call("gather_data", deadline_s):
            self._check_member("destination", destination)
            payload = encode(value, what="the value to gather")
            headers = self._exchange.agree("gather_data", destination, payload)
            payloads = self._exchange.payloads_at(headers, payload, destination)
            return [decode(each) for each in payloads] if self.rank == destination else None

    def scatter_data(
        self, values: Sequence[Plain] | None = None, source: int = 0, *, deadline_s: float | None = None
    ) -> Plain:
        """The source's value for this member.

        Args:
            values: one for each member, by group rank; looked at on the source alone.
            source: group-relative.
            deadline_s: for the members to come; None takes the group's.
        """
        with self._calls.call("scatter_data", deadline_s):
            self._check_member("source", source)
            payloads = self._encode_each(values) if self.rank == source else []
            lengths = encode([len(payload) for payload in payloads])
            headers = self._exchange.agree("scatter_data", source, lengths)
            shared = decode(self._exchange.share(headers[source], lengths, source))
            return decode(self._exchange.own_of(payloads, shared, source))

    def send_data(self, value: Plain, destination: int, *, deadline_s: float | None = None) -> None:
        """Send a value to one member (group-relative), which calls `recv_data`."""
        with self._calls.call("send_data", deadline_s, collective=False):
            self._check_member("destination", destination, other=True)
            self._exchange.send("send_data", encode(value, what="the value to send"), destination)

    def recv_data(self, source: int, *, deadline_s: float | None = None) -> Plain:
        """The value that one member (group-relative) sends with `send_data`."""
        with self._calls.call("recv_data", deadline_s, collective=False):
            self._check_member("source", source, other=True)
            return decode(self._exchange.recv(source))

    def decide(self, fn: Callable[[], Plain], *, deadline_s: float | None = None) -> Plain:
        """Run `fn` on the first member alone, and give its result to all.

        One side never waits for a side that has failed: if `fn` raises, all members raise, and the group stays usable,
        for all of them have heard of it.

        Args:
            fn: takes nothing, returns plain data; calls nothing of this group. The others wait for it.
            deadline_s: for `fn` and the members to come; None takes the group's.

        Raises:
            PeerFailedError: on all members: `fn` raised; the text names the first member and the error.
        """
        cause: Exception | None = None
        with self._calls.call("decide", deadline_s):
            payload = b""
            if self.rank == 0:
                try:
                    payload = encode({"value": fn()}, what="the decision")
                except Exception as error:  # noqa: BLE001 - the boundary: it is raised again below, on all members
                    cause, payload = error, encode({"error": one_line(error)})
            headers = self._exchange.agree("decide", 0, payload)
            outcome = decode(self._exchange.share(headers[0], payload, 0))
        if "error" in outcome:
            raise PeerFailedError(self._calls.label(self.ranks[0]), outcome["error"]) from cause
        return outcome["value"]

    def check_equal(self, value: T, *, what: str, deadline_s: float | None = None) -> T:
        """Make sure that all members have the same value: a plan, a shape, a count.

        Only a digest travels, and the values themselves when they differ. The group stays usable after an error.

        Args:
            value: plain data; a dict counts as different when its keys come in another order.
            what: its name in the error.
            deadline_s: for the members to come; None takes the group's.

        Returns:
            The value.

        Raises:
            MismatchError: on all members: they differ; the text shows who has what.
        """
        held: dict[str, tuple[int, ...]] = {}
        with self._calls.call("check_equal", deadline_s):
            payload = encode(value, what=what)
            headers = self._exchange.agree(f"check_equal of {what}", 0, hashlib.sha256(payload).digest())
            if len({header.inline for header in headers}) > 1:
                texts = self._all_gather("check_equal", _shortened(value))
                digests = [(header.inline or b"").hex()[:8] for header in headers]
                for rank, text, digest in zip(self.ranks, texts, digests, strict=True):
                    others = {each for shown, each in zip(texts, digests, strict=True) if shown == text}
                    told = f"{text} (sha256 {digest})" if len(others) > 1 else text  # they differ in what is cut
                    held[told] = (*held.get(told, ()), rank)
        if held:
            raise MismatchError(what, self._calls.text, held)
        return value

    @contextmanager
    def together(self, what: str, *, deadline_s: float | None = None) -> Iterator[None]:
        """A stretch of work that all members do: an error of one is raised on all within seconds.

            with group.together("load the shards"):
                model.load(path)

        A member that raises inside it tells the others: those in a call of the group raise at once, those that still
        work raise when they come to their next call or to the end. The end waits for all members, so after it
        everybody knows that everybody has succeeded. Where several fail at a time, the first to do so raises its own
        error, and each other one its own or the first one's, whichever it meets sooner.

        Args:
            what: the work, for people.
            deadline_s: for the members to come to the end; None takes the group's.

        Raises:
            PeerFailedError: another member failed; its text is the other's error.
        """
        self._calls.check()
        try:
            yield
        except BaseException as error:
            self._calls.fail(error, what)
            raise
        with self._calls.call(f"the end of {what}", deadline_s):
            self._exchange.agree(f"the end of {what}")

    def _all_gather(self, call: str, value: Plain) -> list[Plain]:
        payload = encode(value, what="the value to gather")
        headers = self._exchange.agree(call, 0, payload)
        return [decode(each) for each in self._exchange.all_payloads(headers, payload)]

    def _encode_each(self, values: Sequence[Plain] | None) -> list[bytes]:
        if values is None or len(values) != self.size:
            got = "none" if values is None else str(len(values))
            raise GroupError(f"scatter_data over {self._calls.text} needs one value for each of {self.size}: got {got}")
        return [encode(value, what=f"value {index} to scatter") for index, value in enumerate(values)]

    def _check_member(self, what: str, member: int, *, other: bool = False) -> None:
        if not 0 <= member < self.size:
            raise GroupError(
                f"the {what} in {self._calls.text} is group-relative, 0 to {self.size - 1}: got {member}"
                + (" (a global rank? use ranks.index)" if member in self.ranks else "")
            )
        if other and member == self.rank:
            raise GroupError(f"the {what} in {self._calls.text} must be another member: got {member}, this one")


def _shortened(value: Plain) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 20]} … {text[-16:]}"
