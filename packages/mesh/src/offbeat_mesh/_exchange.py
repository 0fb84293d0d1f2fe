"""Bytes between the members of a group, over gloo on the CPU, whatever device the group's tensors are on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from offbeat_mesh._calls import Calls
from offbeat_mesh._wire import decode, encode
from offbeat_types import MismatchError

HEADER_BYTES: Final = 512
"""What each member sends first. Short data fits in with the header's few words and needs no second message."""

INLINE_BYTES: Final = 256
"""Data up to this length travels in the header."""

CALL_BYTES: Final = 200
"""Room in the header for the text of the call, in UTF-8; a longer text is cut."""


@dataclass(frozen=True)
class Header:
    """What a member says when it comes to a call.

    Args:
        call: what it calls, in full where members must agree on more than the name.
        root: the source or destination, group-relative.
        number: its count of the group's collectives.
        num_bytes: length of its data.
        inline: the data itself, if short.
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
        """What `packed` made."""
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
        """Exchange headers, and short payloads with them.

        Raises:
            MismatchError: the members are in different calls.
        """
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
        """The source's payload, whose header says how long it is."""
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
        """Every member's payload on the destination; nothing on the others."""
        if all(header.inline is not None for header in headers):
            return [header.inline or b"" for header in headers] if self.rank == destination else []
        own = _padded(payload, max(header.num_bytes for header in headers))
        rows = [torch.empty_like(own) for _ in range(self.size)] if self.rank == destination else []
        self._calls.wait(self.control.gather(rows, own, destination, self._calls.backend_timeout()))
        return [to_bytes(row)[: header.num_bytes] for row, header in zip(rows, headers, strict=False)]

    def own_of(self, payloads: Sequence[bytes], lengths: Sequence[int], source: int) -> bytes:
        """The source's payload for this member; all know the lengths."""
        longest = max(lengths)
        rows = [_padded(payload, longest) for payload in payloads]
        own = empty(longest)
        if self.size == 1:
            return payloads[0]
        self._calls.wait(self.control.scatter(own, rows, source, self._calls.backend_timeout()))
        return to_bytes(own)[: lengths[self.rank]]

    def send(self, call: str, payload: bytes, destination: int) -> None:
        """Send a payload to one member."""
        inline = payload if len(payload) <= INLINE_BYTES else None
        self._send(Header(call, self.rank, 0, len(payload), inline).packed(), destination)
        if inline is None:
            self._send(to_tensor(payload), destination)

    def recv(self, source: int) -> bytes:
        """The payload that one member sends."""
        header = Header.unpacked(self._recv(HEADER_BYTES, source))
        return header.inline if header.inline is not None else to_bytes(self._recv(header.num_bytes, source))

    @property
    def control(self) -> dist.ProcessGroup:
        """The gloo group; a group of one has none and does not ask."""
        assert self._control is not None
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
    """[n] uint8."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def to_bytes(data: torch.Tensor) -> bytes:
    """The bytes of [n] uint8."""
    raw: bytes = data.numpy().tobytes()
    return raw


def _padded(payload: bytes, num_bytes: int) -> torch.Tensor:
    row = empty(num_bytes)
    row[: len(payload)] = to_tensor(payload)
    return row
