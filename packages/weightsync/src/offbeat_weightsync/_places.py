"""Where an engine keeps its tensors: found, checked, and written piece by piece."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from offbeat_types import TensorSpec, WeightSyncError
from offbeat_weightsync._tensors import Bytes, check_dtype, tensor_bytes


class Place:
    """An engine's tensor to be written, piece by piece where its elements lie in a row.

    Args:
        tensor: the engine's own. `bytes` are its elements, where they lie in a row in host memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_in_a_row = tensor, tensor.is_contiguous()
        self.bytes = tensor_bytes(tensor) if self.is_in_a_row and tensor.is_cpu else None

    def bytes_of(self, tensor: Tensor) -> Bytes | None:
        """`bytes`, if they are those of this tensor of the same shape and dtype too; None: look at it."""
        is_same = tensor.data_ptr() == self.tensor.data_ptr() and tensor.is_contiguous()
        return self.bytes if is_same else None

    def write(self, offset: int, part: Tensor) -> None:
        """Copy bytes to where they belong, in a row."""
        if self.bytes is not None and part.is_cpu:
            np.copyto(self.bytes[offset : offset + len(part)], part.numpy())  # torch's copy_ is up to a third slower
        else:
            self.tensor.view(-1).view(torch.uint8)[offset : offset + len(part)].copy_(part)


def find_target(target: Callable[[str], Tensor], spec: TensorSpec) -> Tensor:
    """The engine's own tensor for one that is sent, checked.

    Raises:
        WeightSyncError: there is none of that name, or it has another dtype or size.
    """
    try:
        place = target(spec.name)
    except KeyError as error:
        raise WeightSyncError(f"{spec.name}: is being sent, but the engine holds no tensor of that name") from error
    check_dtype(place, spec, "the engine")
    if place.numel() * place.element_size() != spec.num_bytes:
        raise WeightSyncError(f"{spec.name}: planned with shape {spec.shape}, the engine has {tuple(place.shape)}")
    return place.detach() if place.requires_grad else place
