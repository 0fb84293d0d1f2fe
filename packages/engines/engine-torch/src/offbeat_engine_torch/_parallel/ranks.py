"""Joint steps of the ranks of a trainer: agree, exchange, add up. `SingleRank` is the trainer of one process.

All ranks call the same methods with the same arguments in the same order; each method returns the same on all ranks.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from offbeat_core import ConfigError, Floats, Metrics, TrainSequence, merge_metrics
from offbeat_engine_torch._pieces import Piece
from offbeat_mesh import Group, Mesh
from offbeat_training import Box, TrainerRanks, num_elements, slices

Value = TypeVar("Value")

GATHER_BYTES: Final = 8 * 2**20
"""Size of what one call gathers of a parameter from all ranks: a small multiple of it is used beyond the tensor."""
DEVICE_GATHER_BYTES: Final = 64 * 2**20
"""The same on a device with memory of its own, whose links need larger calls: 8 MiB take 20 microseconds at 400 GB/s,
no more than it takes to start a call."""


def rows_at_once(num_rows: int, num_bytes: int, *, on_cpu: bool) -> int:
    """Return how many rows of each rank's part to gather in one call, at least 1.

    Args:
        num_rows: of the largest part.
        num_bytes: of the parts of all ranks.
        on_cpu: they lie in main memory.
    """
    return max(1, (GATHER_BYTES if on_cpu else DEVICE_GATHER_BYTES) * num_rows // max(1, num_bytes))


class SingleRank:
    """The trainer of one process: it holds all, and has nothing to exchange. See `ShardedRanks`."""

    share, num_shares, place, size, leader = 0, 1, 0, 1, True

    def together(self, what: str) -> AbstractContextManager[Any]:
        """Do nothing: there is no other rank."""
        return nullcontext()

    def check_same(self, what: str, sequences: Sequence[TrainSequence]) -> None:
        """Do nothing: there is no rank to differ from."""

    def exchange(self, value: Value) -> list[Value]:
        """Its own."""
        return [value]

    def merge(self, results: Sequence[Metrics], failure: Exception | None) -> Metrics:
        """Its own."""
        if failure is not None:
            raise failure
        return merge_metrics(results)

    def gather(self, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor, which this rank holds whole, in its own format."""
        return piece.values()

    def share_out(self, whole: Tensor | None, piece: Piece) -> None:
        """Copy it."""
        assert whole is not None
        piece.fill(whole)

    def gather_shares(self, values: Floats, counts: Sequence[int]) -> list[Floats]:
        """Its own."""
        return [values]

    def add_partial(self, gradients: Sequence[Tensor]) -> None:
        """Do nothing: no gradient is partial."""

    def add_up(self, counted: Tensor) -> Tensor:
        """Its own."""
        return counted

    def barrier(self) -> None:
        """Do nothing: there is no rank to wait for."""


class ShardedRanks(TrainerRanks):
    """Several ranks on a mesh of the axes dp, cp, tp and ep; ConfigError where it has more than one stage.

    Args:
        mesh: of all ranks.
        device: of this rank.
        replicas: the same ranks, with replicas of the model along pp; None: there is one.

    Attributes:
        replicas: as given, or the mesh.
    """

    def __init__(self, mesh: Mesh, device: torch.device, replicas: Mesh | None = None) -> None:
        if mesh.axes["pp"] > 1:
            raise ConfigError(f"the torch engine has no stages: got pp = {mesh.axes['pp']}; set it to 1")
        self._ep_size = mesh.axes["ep"]
        self._tp: Group = mesh.group("tp")
        speaks = self._tp.rank == 0 and mesh.group("cp").rank == 0
        super().__init__(mesh.group("dp", "cp", "tp"), mesh.group("dp"), device, speaks=speaks)
        self._sharers: Group = mesh.group("dp", "cp")  # of all replicas
        self.replicas = replicas or mesh
        # Ranks of dp and of cp share out the rows of all parameters, and with those of tp hold a whole model.
        self._rows: Group = self.replicas.group("dp", "cp")
        self._model: Group = self.replicas.group("dp", "cp", "tp")

    def gather(self, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole of a parameter, a few rows of every part at a time: the transport's own buffers stay small.

        Each part is rounded to `dtype` before it is gathered; None, or where nothing is gathered: its own format.
        """
        group = self._rows if piece.tp_dim is None else self._model
        local = piece.values()
        if group.size == 1 or piece.shared:
            return local
        whole = local.new_empty(piece.shape, dtype=dtype)
        boxes = [self._box_of(piece, rank) for rank in group.ranks]
        num_rows = boxes[0][0][1] - boxes[0][0][0]  # no rank has more than the first
        step = rows_at_once(num_rows, num_elements(boxes[0]) * whole.itemsize * group.size, on_cpu=whole.is_cpu)
        for start in range(0, num_rows, step):
            length = min(step, num_rows - start)
            rows = local[start : start + length].to(whole.dtype)
            if len(rows) < length:
                rows = torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])
            for box, found in zip(boxes, group.all_gather(rows), strict=True):
                (first, stop), *others = box
                here = (min(first + start, stop), min(first + start + length, stop))
                whole[slices((here, *others))] = found[: here[1] - here[0]]
        return whole

    def share_out(self, whole: Tensor | None, piece: Piece) -> None:
        """Fill a parameter's piece on every rank out of the whole of it, which the leader alone has."""
        sent = piece.local.new_empty(piece.shape, dtype=piece.dtype)
        if whole is not None:
            sent.copy_(whole)
        piece.fill(self._all.broadcast(sent))

    def _box_of(self, piece: Piece, rank: int) -> Box:
        """Return what another rank holds of a parameter."""
        # In the order of ranks, those of tp come first, and those of ep of the other way of counting.
        size = self._ep_size if piece.is_stack else self._tp.size
        rows, place = divmod(self._model.ranks.index(rank), size)
        return piece.box_at(dp=(rows, self._model.size // size), tp=(place, size))

    def add_partial(self, gradients: Sequence[Tensor]) -> None:
        """Add up, in place, gradients that each tp rank has for its own heads only; in one call."""
        if self._tp.size > 1 and gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._tp.all_reduce(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def add_up(self, counted: Tensor) -> Tensor:
        """Add up, in place, what each share of tokens has counted: all tp ranks count the same."""
        return self._sharers.all_reduce(counted)

    def barrier(self) -> None:
        """Wait for all."""
        self._all.barrier()


Ranks = SingleRank | ShardedRanks
