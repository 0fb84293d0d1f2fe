"""Parts of each parameter that a rank holds, as boxes of indices in the whole tensor; of what is saved beside them
(a router's correction bias, say), every rank holds the whole.

A box is what sharded training, loading and resharding have in common: a rank reads its box out of a file, writes its
box into a checkpoint, and finds in the boxes of other ranks what it needs when the number of ranks has changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from offbeat_engine_torch._formats import stays_in_float32
from offbeat_engine_torch._layers.nf4 import Nf4Weight, packed_weights
from offbeat_engine_torch._model import ADAPTER_SIDES, CausalModel, plain_name
from offbeat_training import Box, CutTensor, num_elements, slices, whole_box


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece(CutTensor):
    """One parameter or persistent buffer, and the part of it that this rank holds.

    Args:
        box: this rank's part.
        local: the values in `box`, or the bytes that stand for them; memory shared with the model.
        parameter: as the model holds it; gradients arrive there. A buffer, which has none, where `shared`.
        owned: this rank counts and writes the part; False for a copy of what tp rank 0, or the first replica, holds.
        shared: a buffer: nothing cuts or trains it, and every rank holds the same.
        in_float32: it is never rounded: see `stays_in_float32`.
        is_stack: of experts, which ranks of ep hold between them: `tp_dim` and `box_at` say ep where they say tp, and
            edp where they say dp.
        packed: what the bytes of a frozen weight stand for; None for others.
    """

    box: Box
    local: Tensor
    parameter: Tensor
    owned: bool = True
    shared: bool = False
    in_float32: bool = False
    is_stack: bool = False
    packed: Nf4Weight | None = None

    @property
    def is_adapter(self) -> bool:
        """Return whether it is one side of a LoRA adapter."""
        return self.name.endswith(ADAPTER_SIDES)

    @property
    def changes(self) -> bool:
        """Return whether an update changes it: a trained parameter, or what may be a router's bias."""
        return self.shared or self.parameter.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """Return the format of the values."""
        return torch.bfloat16 if self.packed else self.local.dtype

    def values(self) -> Tensor:
        """Return the values in `box`: those of a frozen weight that is packed in memory of their own."""
        return self.packed.unpack(self.local, self.box[0][0]) if self.packed else self.local

    def fill(self, whole: Tensor) -> None:
        """Take the values out of the whole tensor."""
        if self.packed:
            start, stop = self.box[0]
            self.local.copy_(self.packed.pack(whole.to(self.local.device))[start:stop])
        else:
            self.local.copy_(whole[slices(self.box)])

    def take_gradient(self) -> Tensor | None:
        """Return the gradient of `local`, taken away from the model."""
        grad, self.parameter.grad = self.parameter.grad, None
        return grad.to_local() if isinstance(grad, DTensor) else grad


Places = tuple[tuple[int, int], tuple[int, int]]
"""Place of a rank along the axis whose ranks cut rows, and that axis's size; the same along that of whole parts."""


def find_pieces(
    model: CausalModel,
    *,
    places: Places = ((0, 1), (0, 1)),
    of_stacks: Places = ((0, 1), (0, 1)),
    is_first: bool = True,
) -> list[Piece]:
    """List what this rank holds: parameters in the model's own order, then persistent buffers.

    Args:
        model: plain, or sharded over the axes dp (rows of what tp left) and tp, stacks over edp and ep.
        places: of this rank along dp, with cp, and along tp.
        of_stacks: the same along edp and ep.
        is_first: this rank is of the first replica of the model, which counts and writes its parts.
    """
    return list(_pieces(model, places, of_stacks, is_first=is_first))


def trained_parameters(pieces: Sequence[Piece]) -> dict[str, nn.Parameter]:
    """Return what the optimizer updates: the model's own parameters, or plain views of this rank's parts of them."""
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
def _pieces(model: CausalModel, places: Places, of_stacks: Places, *, is_first: bool) -> Iterator[Piece]:
    stays, packed = stays_in_float32(model.whole), packed_weights(model.whole)
    for full_name, parameter in model.whole.named_parameters():
        weight = packed.get(full_name)
        name, shape = plain_name(full_name), tuple(parameter.shape) if weight is None else weight.shape
        is_stack = _cut_dim(parameter, "ep") is not None
        dp, tp = of_stacks if is_stack else places
        tp_dim = _cut_dim(parameter, "ep" if is_stack else "tp") if tp[1] > 1 else None
        box = CutTensor(name=name, shape=shape, tp_dim=tp_dim).box_at(dp=dp, tp=tp)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        assert weight or tuple(local.shape) == tuple(stop - start for start, stop in box), name
        owned = is_first and (tp_dim is not None or tp[0] == 0)
        yield Piece(
            name=name,
            shape=shape,
            box=box,
            local=local,
            parameter=parameter,
            tp_dim=tp_dim,
            owned=owned,
            in_float32=stays(name),
            is_stack=is_stack,
            packed=weight,
        )
    for name, buffer in _saved_buffers(model.whole):
        shape, kept = tuple(buffer.shape), stays(name)
        box = whole_box(shape)
        yield Piece(name=name, shape=shape, box=box, local=buffer, parameter=buffer, shared=True, in_float32=kept)


def _saved_buffers(whole: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a checkpoint: those that torch calls persistent."""
    for path, module in whole.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _cut_dim(parameter: Tensor, axis: str) -> int | None:
    """Dimension that was cut along tp or ep: its placement comes after that of the axis that cuts rows."""
    if not isinstance(parameter, DTensor) or axis not in (parameter.device_mesh.mesh_dim_names or ()):
        return None
    assert parameter.device_mesh.mesh_dim_names is not None
    placement = parameter.placements[parameter.device_mesh.mesh_dim_names.index(axis)]
    return placement.dim if isinstance(placement, Shard) else None


def memory_of(pieces: Sequence[Piece]) -> list[Tensor]:
    """Memory of a model's parameters on this rank, and, where the model is not cut, all tensors that share it.

    Buffers, a few kilobytes, stay where they are.
    """
    cut = [piece for piece in pieces if not piece.shared]
    parameters = [piece.parameter for piece in cut]
    return [*(piece.local for piece in cut), *(each for each in parameters if not isinstance(each, DTensor))]
