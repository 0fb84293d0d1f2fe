"""Plain data between the members of a group: MessagePack, numpy arrays as one extension type, over gloo on the CPU.

Every collective form begins with an exchange of short headers between all members. It carries short data along, and
it proves that the members are in the same call: if one came to another, all of them raise `MismatchError`.

Source: the MessagePack specification, https://github.com/msgpack/msgpack/blob/master/spec.md
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from offbeat_core import GroupError, MismatchError, PeerFailedError
from offbeat_mesh._calls import Calls
from offbeat_mesh._control_messages import one_line

Plain: TypeAlias = Any
"""None, bool, int of 64 bit, float, str, bytes, list, tuple, dict with str keys, numpy array or number; nested."""

LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})

ARRAY_EXTENSION: Final = 1
"""Our number for a numpy array: one byte n, n bytes of MessagePack [dtype, *shape], then the items in C order."""

ARRAY_DTYPE: Final = re.compile(r"[<>|=][biufcSU]\d+")
"""numpy's dtype texts that can travel: no objects, no records, no dates."""


def encode(value: Plain, *, what: str = "the value") -> bytes:
    """Return a tuple arrives as a list, a numpy number as a Python one.

    A GroupError says what in the value cannot travel.
    """
    try:
        _check(value, what)
        return msgspec.msgpack.encode(value, enc_hook=_encode_numpy)
    except (TypeError, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise GroupError(
            f"{what} cannot travel between ranks: {error}; send None, bool, int of at most 64 bit, float, str, bytes, "
            "list, dict with str keys, or a numpy array of numbers (tensors have calls of their own)"
        ) from error


def decode(data: bytes | bytearray | memoryview) -> Plain:
    """Return what `encode` was given."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_extension)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise GroupError(
            f"bytes from another rank are not plain data: {error}; do all ranks run one version?"
        ) from error


def _check(value: Plain, where: str) -> None:
    """Refuse what MessagePack could write but not give back as it was: other keys, sets, dates, classes."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, a {type(key).__name__}")
            _check(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        if not set(map(type, value)) <= LEAVES:  # a long list of numbers is checked in one go
            for index, item in enumerate(value):
                _check(item, f"{where}[{index}]")
    elif type(value) not in LEAVES and not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{where} is a {type(value).__name__}")


def _encode_numpy(value: object) -> object:
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.item()
    array = np.asarray(value)
    if not ARRAY_DTYPE.fullmatch(array.dtype.str):
        raise TypeError(f"it holds a numpy array of dtype {array.dtype}")
    head = msgspec.msgpack.encode([array.dtype.str, *array.shape])
    return msgspec.msgpack.Ext(ARRAY_EXTENSION, bytes([len(head)]) + head + array.tobytes())


def _decode_extension(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != ARRAY_EXTENSION:
        raise ValueError(f"unknown extension {code}")
    end = 1 + data[0]
    dtype, *shape = msgspec.msgpack.decode(data[1:end])
    if not ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"a numpy array of dtype {dtype}")
    array: np.ndarray[Any, Any] = np.frombuffer(data[end:], dtype=dtype).reshape(shape).copy()
    return array


HEADER_BYTES: Final = 512
"""Bytes that each member sends first. Short data fits in with the header's few words and needs no second message."""

INLINE_BYTES: Final = 256
"""Data up to this length travels in the header."""

CALL_BYTES: Final = 200
"""Room in the header for the text of the call, in UTF-8; a longer text is cut."""


@dataclass(frozen=True)
class Header:
    """First message of a member at a call: which call, its count of the group's collectives, and its data if short.

    Args:
        call: in full where members must agree on more than the name.
        root: the source or destination, group-relative.
    """

    call: str
    root: int
    number: int
    num_bytes: int
    inline: bytes | None

    def packed(self) -> torch.Tensor:
        """[HEADER_BYTES] uint8."""
        call = self.call.encode(errors="replace")[:CALL_BYTES].decode(errors="ignore")
        data = encode([call, self.root, self.number, self.num_bytes, self.inline])
        frame = np.zeros(HEADER_BYTES, dtype=np.uint8)
        frame[0], frame[1] = divmod(len(data), 256)
        frame[2 : 2 + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return torch.from_numpy(frame)

    @classmethod
    def unpacked(cls, frame: torch.Tensor) -> "Header":
        data = to_bytes(frame)
        return cls(*decode(data[2 : 2 + data[0] * 256 + data[1]]))


class Exchange:
    """The byte transport of one group; every method is one step of a call, made inside `Calls.call`."""

    def __init__(self, calls: Calls, control: dist.ProcessGroup | None) -> None:
        self._calls = calls
        self._control = control
        self.size = len(calls.ranks)
        self.rank = calls.ranks.index(calls.rank)

    def agree(self, call: str, root: int = 0, payload: bytes = b"") -> list[Header]:
        """Exchange headers, and short payloads with them."""
        inline = payload if len(payload) <= INLINE_BYTES else None
        own = Header(call, root, self._calls.standing()[0], len(payload), inline)
        frames = self._all_gather(own.packed())
        headers = [Header.unpacked(frame) for frame in frames]
        held: dict[str, tuple[int, ...]] = {}
        for rank, header in zip(self._calls.ranks, headers, strict=True):
            text = f"{header.call} with root {header.root} as call {header.number}"
            held[text] = (*held.get(text, ()), rank)
        if len(held) > 1:
            raise MismatchError("the call", self._calls.text, held)
        return headers

    def agree_on_counts(self, call: str, counts: Sequence[int]) -> list[list[int]]:
        """Every member's counts."""
        payload = encode(list(counts))
        return [decode(each) for each in self.all_payloads(self.agree(call, 0, payload), payload)]

    def share(self, header: Header, payload: bytes, source: int) -> bytes:
        if header.inline is not None:
            return header.inline
        data = to_tensor(payload) if self.rank == source else empty(header.num_bytes)
        self._calls.wait(self.control.broadcast(data, source, self._calls.backend_timeout()))
        return to_bytes(data)

    def all_payloads(self, headers: Sequence[Header], payload: bytes) -> list[bytes]:
        """Every member's payload."""
        if all(header.inline is not None for header in headers):
            return [header.inline or b"" for header in headers]
        rows = self._all_gather(_padded(payload, max(header.num_bytes for header in headers)))
        return [to_bytes(row)[: header.num_bytes] for row, header in zip(rows, headers, strict=True)]

    def payloads_at(self, headers: Sequence[Header], payload: bytes, destination: int) -> list[bytes]:
        if all(header.inline is not None for header in headers):
            return [header.inline or b"" for header in headers] if self.rank == destination else []
        own = _padded(payload, max(header.num_bytes for header in headers))
        rows = [torch.empty_like(own) for _ in range(self.size)] if self.rank == destination else []
        self._calls.wait(self.control.gather(rows, own, destination, self._calls.backend_timeout()))
        return [to_bytes(row)[: header.num_bytes] for row, header in zip(rows, headers, strict=False)]

    def own_of(self, payloads: Sequence[bytes], lengths: Sequence[int], source: int) -> bytes:
        longest = max(lengths)
        rows = [_padded(payload, longest) for payload in payloads]
        own = empty(longest)
        if self.size == 1:
            return payloads[0]
        self._calls.wait(self.control.scatter(own, rows, source, self._calls.backend_timeout()))
        return to_bytes(own)[: lengths[self.rank]]

    def send(self, call: str, payload: bytes, destination: int) -> None:
        inline = payload if len(payload) <= INLINE_BYTES else None
        self._send(Header(call, self.rank, 0, len(payload), inline).packed(), destination)
        if inline is None:
            self._send(to_tensor(payload), destination)

    def recv(self, source: int) -> bytes:
        """Return the payload that one member sends."""
        header = Header.unpacked(self._recv(HEADER_BYTES, source))
        return header.inline if header.inline is not None else to_bytes(self._recv(header.num_bytes, source))

    @property
    def control(self) -> dist.ProcessGroup:
        assert self._control is not None, "a group of one has none and does not ask"
        return self._control

    def _all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [row]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._calls.wait(self.control.allgather(rows, row, self._calls.backend_timeout()))
        return rows

    def _send(self, data: torch.Tensor, destination: int) -> None:
        work = dist.isend(data, group=self.control, group_dst=destination)
        self._calls.wait(work, peer=self._calls.ranks[destination])

    def _recv(self, num_bytes: int, source: int) -> torch.Tensor:
        data = empty(num_bytes)
        work = dist.irecv(data, group=self.control, group_src=source)
        self._calls.wait(work, peer=self._calls.ranks[source])
        return data


def empty(num_bytes: int) -> torch.Tensor:
    """[n] uint8 on the CPU, also where torch's default device is another."""
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))


def to_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def to_bytes(data: torch.Tensor) -> bytes:
    raw: bytes = data.numpy().tobytes()
    return raw


def _padded(payload: bytes, num_bytes: int) -> torch.Tensor:
    row = empty(num_bytes)
    row[: len(payload)] = to_tensor(payload)
    return row


T = TypeVar("T")

VALUE_CHARS = 120
"""Longest text of each value that a disagreement shows."""


class DataGroup:
    """The plain-data half of `Group`; see there for `source`, `destination` and `deadline_s`.

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
        """Return how many members."""
        return self._exchange.size

    @property
    def rank(self) -> int:
        """Return which of them this process is: group-relative, never global."""
        return self._exchange.rank

    def broadcast_data(self, value: Plain = None, source: int = 0, *, deadline_s: float | None = None) -> Plain:
        """Return the source's value, on all members; the others' are not looked at."""
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
        """Return the source's value for this member, of one for each by group rank; the others' are not looked at."""
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
        """Return the value that one member (group-relative) sends with `send_data`."""
        with self._calls.call("recv_data", deadline_s, collective=False):
            self._check_member("source", source, other=True)
            return decode(self._exchange.recv(source))

    def decide(self, fn: Callable[[], Plain], *, deadline_s: float | None = None) -> Plain:
        """Run `fn` on the first member alone, and give its result to all.

        One side never waits for a side that has failed: if `fn` raises, all members raise, and the group stays usable,
        since all of them know of it.

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
        """Make sure that all members have the same value, and return it: a plan, a shape, a count.

        Only a digest travels, and the values themselves when they differ; a dict counts as different when its keys come
        in another order. The group stays usable after an error.

        Raises:
            MismatchError: on all members: they differ; the text shows each value and its ranks, under the name `what`.
        """
        held: dict[str, tuple[int, ...]] = {}
        with self._calls.call("check_equal", deadline_s):
            payload = encode(value, what=what)
            headers = self._exchange.agree(f"check_equal of {what}", 0, hashlib.sha256(payload).digest())
            if len({header.inline for header in headers}) > 1:
                texts = self._all_gather("check_equal", _shortened(value))
                digests = [(header.inline or b"").hex()[:8] for header in headers]
                for rank, text, digest in zip(self.ranks, texts, digests, strict=True):
                    others = {each for other, each in zip(texts, digests, strict=True) if other == text}
                    shown = f"{text} (sha256 {digest})" if len(others) > 1 else text  # they differ in what is cut
                    held[shown] = (*held.get(shown, ()), rank)
        if held:
            raise MismatchError(what, self._calls.text, held)
        return value

    @contextmanager
    def together(self, what: str, *, deadline_s: float | None = None) -> Iterator[None]:
        """A stretch of work that all members do: an error of one is raised on all within seconds.

            with group.together("load the shards"):
                model.load(path)

        A member that raises inside it notifies the others: those in a call of the group raise at once, those that still
        work raise when they come to their next call or to the end. The end waits for all members, so after it
        every member knows that all have succeeded. Where several fail at a time, the first to do so raises its own
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
