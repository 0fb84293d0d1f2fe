"""Which part of each parameter a rank holds, as a box of indices in the whole tensor; of what is saved beside them
(a router's correction bias, say), every rank holds the whole.

A box is what sharded training, loading and resharding have in common: a rank reads its box out of a file, writes its
box into a checkpoint, and finds in the boxes of other ranks what it needs when the number of ranks has changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from offbeat_engine_torch._model import CausalModel, plain_name
from offbeat_training import Box, num_elements, whole_box


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """One parameter or persistent buffer, and the part of it that this rank holds.

    Args:
        name: Hugging Face name, adapters included.
        shape: of the whole tensor.
        box: this rank's part.
        local: the values in `box`; memory shared with the model.
        parameter: as the model holds it; gradients arrive there. A buffer, which has none, where `shared`.
        tp_dim: dimension cut along the mesh axis tp; None where every tp rank holds the same.
        owned: this rank counts and writes the part; False for a copy of what tp rank 0 holds.
        shared: a buffer: nothing cuts or trains it, and every rank holds the same.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: Tensor
    parameter: Tensor
    tp_dim: int | None = None
    owned: bool = True
    shared: bool = False

    def take_gradient(self) -> Tensor | None:
        """The gradient of `local`, taken away from the model."""
        grad, self.parameter.grad = self.parameter.grad, None
        return grad.to_local() if isinstance(grad, DTensor) else grad


def row_chunk(num_rows: int, num_parts: int, part: int) -> tuple[int, int]:
    """Rows of one part, as `torch.chunk` cuts: all parts are as long as the first, until the rows run out."""
    length = -(-num_rows // num_parts)
    return min(part * length, num_rows), min((part + 1) * length, num_rows)


def cut_box(shape: tuple[int, ...], tp_dim: int | None, *, dp: tuple[int, int], tp: tuple[int, int]) -> Box:
    """The part of a tensor at one place of the mesh: cut over tp first, then the rows that are left over dp.

    Args:
        shape: of the whole tensor.
        tp_dim: dimension cut over tp; None for none.
        dp: place along dp, and the size of the axis.
        tp: the same along tp.
    """
    box = list(whole_box(shape))
    if tp_dim is not None:
        box[tp_dim] = row_chunk(shape[tp_dim], tp[1], tp[0])
    if dp[1] > 1:
        first, stop = box[0]
        start, end = row_chunk(stop - first, dp[1], dp[0])
        box[0] = (first + start, first + end)
    return tuple(box)


def find_pieces(model: CausalModel, *, dp: tuple[int, int] = (0, 1), tp: tuple[int, int] = (0, 1)) -> list[Piece]:
    """List what this rank holds: parameters in the model's own order, then persistent buffers.

    Args:
        model: plain, or sharded over the axes dp (rows of what tp left) and tp.
        dp: this rank's place along dp, and the size of the axis.
        tp: the same along tp.
    """
    return list(_pieces(model, dp, tp))


def trained_parameters(pieces: Sequence[Piece]) -> dict[str, nn.Parameter]:
    """What the optimizer updates: the model's own parameters, or plain views of this rank's parts of them."""
    return {
        piece.name: nn.Parameter(piece.local) if isinstance(piece.parameter, DTensor) else piece.parameter
        for piece in pieces
        if isinstance(piece.parameter, nn.Parameter) and piece.parameter.requires_grad and num_elements(piece.box)
    }


def collect_gradients(pieces: Sequence[Piece], parameters: Mapping[str, nn.Parameter]) -> None:
    """Bring gradients to where `trained_parameters` said the optimizer looks for them."""
    for piece in pieces:
        parameter = parameters.get(piece.name)
        if parameter is not piece.parameter:
            grad = piece.take_gradient()
            if parameter is not None:
                parameter.grad = grad


@torch.no_grad()
def _pieces(model: CausalModel, dp: tuple[int, int], tp: tuple[int, int]) -> Iterator[Piece]:
    for name, parameter in model.whole.named_parameters():
        shape, tp_dim = tuple(parameter.shape), _tp_dim(parameter) if tp[1] > 1 else None
        box = cut_box(shape, tp_dim, dp=dp, tp=tp)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        assert tuple(local.shape) == tuple(stop - start for start, stop in box), name
        yield Piece(
            name=plain_name(name),
            shape=shape,
            box=box,
            local=local,
            parameter=parameter,
            tp_dim=tp_dim,
            owned=tp_dim is not None or tp[0] == 0,
        )
    for name, buffer in _saved_buffers(model.whole):
        shape = tuple(buffer.shape)
        yield Piece(name=name, shape=shape, box=whole_box(shape), local=buffer, parameter=buffer, shared=True)


def _saved_buffers(whole: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a checkpoint: those that torch calls persistent."""
    for path, module in whole.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _tp_dim(parameter: Tensor) -> int | None:
    """Dimension that tensor parallelism cut: its placement comes after that of the data-parallel axis."""
    if not isinstance(parameter, DTensor) or "tp" not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    assert parameter.device_mesh.mesh_dim_names is not None
    placement = parameter.placements[parameter.device_mesh.mesh_dim_names.index("tp")]
    return placement.dim if isinstance(placement, Shard) else None


def memory_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """Memory of a model's parameters on this rank, and, where the model is not cut, everybody who shares it.

    Buffers, a few kilobytes, stay where they are.
    """
    cut = [piece for piece in pieces if not piece.shared]
    parameters = [piece.parameter for piece in cut]
    return [*(piece.local for piece in cut), *(each for each in parameters if not isinstance(each, DTensor))]
