"""Copies of the ranks' states in main memory, from which a rank that has died is given its state again.

After an update each rank packs its state into one run of bytes, its own copy. While it computes the next update, a
thread gives the copy to the next rank, which holds it too. Only once all ranks have both do they forget those of the
update before: so whenever a rank dies, there is an update whose state all ranks have had, with two copies of every part
of it. The next copies are begun only then: so that update is the last that all have ended, or the one before it.

    rank:                  0        1        2        3
    holds the states of    0 and 3  1 and 0  2 and 1  3 and 2

    computes               | update 1      | update 2           | update 3
    packs                                 1|                   2|
    sends                                  | copies of 1 |      | copies of 2 |
    all have               |      0              |        1          |       2
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from offbeat_core import ModelError, OffbeatError
from offbeat_device import Device
from offbeat_engine_torch._lengths import LengthLimit
from offbeat_engine_torch._pieces import Piece
from offbeat_engine_torch._policy import Policy
from offbeat_engine_torch._state.ring import Ring
from offbeat_mesh import Group
from offbeat_training import ClippedAdamW, random_state, restore_random_state

_CLOSING_S: Final = 2.0
"""Time for copies that are almost there, when ranks close or are made anew."""
_ALIGN: Final = 16
"""Tensors begin at a multiple of so many bytes, so that they can be read where they lie."""


class _Entry(msgspec.Struct, frozen=True):
    """One tensor of a state: the format by torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _About(msgspec.Struct, frozen=True):
    """Contents of a state beside its tensors.

    Args:
        steps: updates of each parameter that has moments.
        limit: as the check of the family has found it.
        note: of the caller.
    """

    entries: list[_Entry]
    steps: dict[str, float]
    steps_taken: int
    steps_refused: int
    limit: LengthLimit | None
    note: bytes


@dataclass(frozen=True)
class _Pair:
    """Bytes of this rank's state, and of that of the rank before it."""

    own: Tensor
    peers: Tensor


@dataclass
class PeerCopies:
    """Copies that one rank holds, by the number of updates that the state has had: one, or two while they are sent."""

    held: dict[int, _Pair] = field(default_factory=dict)
    _sending: threading.Thread | None = None
    _error: BaseException | None = None
    _ring: Ring | None = None

    def begin(self, version: int, own: Tensor, ranks: Group) -> None:
        """Run `keep` in a thread; all ranks do, after `wait`.

        Args:
            version: of the state.
            own: this rank's state, which nothing else changes.
            ranks: on a channel that nothing else uses.
        """

        def send() -> None:
            try:
                self.keep(version, own, ranks)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it in the thread that computes
                if threading.current_thread() is self._sending:  # else it was given up by `close`
                    self._error = error

        self._sending = threading.Thread(target=send, name=f"copies of version {version}", daemon=True)
        self._sending.start()

    def wait(self) -> None:
        """Wait until all ranks have the copies that were begun; raise what has kept them from that."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Send no more, after a moment for what is almost there; the connections are of no use afterwards."""
        for _ in range(2):
            if self._sending is not None:
                self._sending.join(_CLOSING_S)
            if self._ring is not None:
                self._ring.close()
                self._ring = None
        self._sending = None

    def keep(self, version: int, own: Tensor, ranks: Group) -> None:
        """Hold this rank's state, and that of the rank before it; a call of all ranks."""
        sizes = ranks.all_gather_data(own.numel())
        if self._ring is None:
            self._ring = Ring.open(ranks)
        self.held[version] = _Pair(own, self._ring.pass_on(own, sizes[(ranks.rank - 1) % ranks.size]))
        ranks.barrier()  # before it some ranks may have only those of the version before
        self.held = {version: self.held[version]}

    def recover(self, ranks: Group) -> int:
        """Hold what this rank should of the newest version of which every part is left; a call of all ranks.

        Args:
            ranks: as many as have kept copies, each in the place that it had; one without copies gets its own.

        Returns:
            The version.

        Raises:
            OffbeatError: on all ranks: of no version every part is left.
        """
        table: list[dict[int, tuple[int, int]]] = [
            dict(row)
            for row in ranks.all_gather_data([(v, (p.own.numel(), p.peers.numel())) for v, p in self.held.items()])
        ]
        version, self._error = _newest_whole(table), None
        lost = [rank for rank, held in enumerate(table) if version not in held]
        following, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        mine = self.held.get(version)
        is_lost = mine is None
        # Each lost rank's own state from the one after it, and from the one before it the copy that it held.
        own_size = {following: table[following][version][1]} if is_lost else {}
        own = _ship(ranks, {before: mine.peers} if mine and before in lost else {}, own_size)
        peers_size = {before: table[before][version][0]} if is_lost else {}
        peers = _ship(ranks, {following: mine.own} if mine and following in lost else {}, peers_size)
        self.held = {version: mine or _Pair(own[following], peers[before])}
        return version


def _newest_whole(table: Sequence[Mapping[int, tuple[int, int]]]) -> int:
    """Return the newest version of which each rank, or the one after it, has a state."""
    size = len(table)
    holders = {
        version: {rank for rank, held in enumerate(table) if version in held}
        for version in sorted({version for held in table for version in held})
    }
    gaps = {
        version: [rank for rank in range(size) if not {rank, (rank + 1) % size} & ranks]
        for version, ranks in holders.items()
    }
    if whole := [version for version, ranks in gaps.items() if not ranks]:
        return whole[-1]
    lost = next(reversed(gaps.values()), list(range(size)))
    named = ", ".join(map(str, lost))
    raise OffbeatError(
        f"the state of rank {named} is lost, and with the rank after it the only copy: load the last checkpoint"
    )


def _ship(ranks: Group, sent: Mapping[int, Tensor], coming: Mapping[int, int]) -> dict[int, Tensor]:
    """Give bytes to at most one rank, and take so many from at most one; a call of all ranks."""
    counts = [len(sent[rank]) if rank in sent else 0 for rank in range(ranks.size)]
    wanted = [coming.get(rank, 0) for rank in range(ranks.size)]
    given = next(iter(sent.values()), torch.empty(0, dtype=torch.uint8))
    arrived = ranks.all_to_all_runs(given, counts, wanted)
    return dict.fromkeys(coming, arrived)


def pack_state(policy: Policy, optimizer: ClippedAdamW, device: Device, steps_refused: int, note: bytes) -> Tensor:
    """Return a rank's state as [n] uint8 in main memory."""
    pieces = [piece for piece in policy.pieces if piece.changes]  # the rest is read from the model
    steps = {name: found for name in optimizer.parameters if (found := optimizer.steps_of(name)) is not None}
    random = random_state(device)
    entries = [_entry(f"weight.{piece.name}", piece.local.dtype, piece.local.shape) for piece in pieces]
    for name in steps:
        shape = optimizer.parameters[name].shape
        entries += [_entry(f"{moment}.{name}", torch.float32, shape) for moment in optimizer.moments_of(name)]
    entries += [_entry(name, tensor.dtype, tensor.shape) for name, tensor in random.items()]
    head = msgspec.msgpack.encode(_About(entries, steps, optimizer.steps_taken, steps_refused, policy.limit, note))
    packed = torch.zeros(_end_of(head, entries), dtype=torch.uint8)
    packed[:8] = torch.tensor([len(head)]).view(torch.uint8)
    packed[8 : 8 + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    places = _places(packed, len(head), entries)
    for piece in pieces:
        next(places).copy_(piece.local)
    for name in steps:  # one after the other: they may be held in fewer bytes
        for tensor in optimizer.state_of(name).values():
            next(places).copy_(tensor)
    for tensor in random.values():
        next(places).copy_(tensor)
    return packed


class PackedState:
    """A state that `pack_state` has packed, read where it lies.

    Args:
        packed: its bytes.

    Attributes:
        limit: as the check of the family has found it.
        steps_refused: by the optimizer, until then.
        note: of the caller.
    """

    def __init__(self, packed: Tensor) -> None:
        size = int(packed[:8].view(torch.int64))
        self._about = about = msgspec.msgpack.decode(packed[8 : 8 + size].numpy().tobytes(), type=_About)
        self._found = dict(
            zip([each.name for each in about.entries], _places(packed, size, about.entries), strict=True)
        )
        self.limit, self.steps_refused, self.note = about.limit, about.steps_refused, about.note

    @torch.no_grad()
    def fill(self, pieces: Sequence[Piece]) -> None:
        """Give their values to pieces that updates change.

        Raises:
            ModelError: it is of another model.
        """
        for piece in pieces:
            if not piece.changes:
                continue
            copy = self._found.get(f"weight.{piece.name}")
            if copy is None or copy.shape != piece.local.shape:
                raise ModelError(f"the copy of this rank's state is of another model, or of other ranks: {piece.name}")
            piece.local.copy_(copy)

    def restore(self, optimizer: ClippedAdamW, device: Device) -> None:
        """Give the optimizer its moments, and random generators their state."""
        found, about = self._found, self._about
        states = (
            (name, steps, {each: _own(found[f"{each}.{name}"], optimizer, name) for each in optimizer.moments_of(name)})
            for name, steps in about.steps.items()
        )
        optimizer.load_state(states, about.steps_taken)
        restore_random_state(found, device)


def _own(moment: Tensor, optimizer: ClippedAdamW, name: str) -> Tensor:
    """Return a moment in memory of its own, where its parameter lies."""
    return torch.empty_like(optimizer.parameters[name]).copy_(moment)


def _entry(name: str, dtype: torch.dtype, shape: Sequence[int]) -> _Entry:
    return _Entry(name, str(dtype).removeprefix("torch."), tuple(shape))


def _bytes_of(entry: _Entry) -> int:
    dtype: Any = getattr(torch, entry.dtype)
    return int(torch.Size(entry.shape).numel() * dtype.itemsize)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _end_of(head: bytes, entries: Sequence[_Entry]) -> int:
    return _aligned(8 + len(head)) + sum(_aligned(_bytes_of(entry)) for entry in entries)


def _places(packed: Tensor, head_size: int, entries: Sequence[_Entry]) -> Iterator[Tensor]:
    """Iterate over the tensors of a packed state, in its memory."""
    offset = _aligned(8 + head_size)
    for entry in entries:
        size = _bytes_of(entry)
        yield packed[offset : offset + size].view(getattr(torch, entry.dtype)).view(entry.shape)
        offset += _aligned(size)
