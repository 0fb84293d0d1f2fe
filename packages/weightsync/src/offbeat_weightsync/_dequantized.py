"""FP8 blocks on their way into an engine that computes in another format: their values, and the scales beside."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat_types import WeightProof, WeightStream, WeightSyncError
from offbeat_weightsync._fp8 import SCALE_SUFFIX, dequantize_blocks, requantize_blocks


class DequantizedStream:
    """A `WeightStream` of FP8 blocks, handed out as the float32 values that they stand for, under the weights' names.

    The proof is of blocks and scales as they were sent: each weight is read back and divided by its scale, which gives
    its block again to the bit as long as the engine's format is finer than e4m3. So an element counts as the one that
    was sent if it is nearer to that than to the next that e4m3 has.

    Args:
        stream: in which the scale of a block-quantised weight comes right after it (`quantize_tensors`).
    """

    def __init__(self, stream: WeightStream) -> None:
        self._stream, self.version = stream, stream.version
        self._scales: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor); scales do not show.

        Raises:
            WeightSyncError: a quantised weight without its scale, or a scale without its weight.
        """
        tensors = iter(self._stream)
        for name, tensor in tensors:
            if name.endswith(SCALE_SUFFIX):
                raise WeightSyncError(f"{name}: a scale came without its weight before it")
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float8_e4m3fn:
                yield name, tensor
                continue
            blocks = tensor.clone()  # it is valid until the next is asked for
            scale_name, scales = next(tensors, ("nothing", None))
            if scale_name != name + SCALE_SUFFIX or scales is None:
                raise WeightSyncError(f"{name}: FP8 blocks must be followed by {name + SCALE_SUFFIX}, got {scale_name}")
            self._scales[name] = scales.clone()
            yield name, dequantize_blocks(blocks, self._scales[name])

    def prove(self, read: Callable[[str], Any]) -> WeightProof:
        """See `WeightStream.prove`; `read` gives weights in the engine's format."""

        def read_sent(name: str) -> Any:
            weight = name.removesuffix(SCALE_SUFFIX)
            if weight not in self._scales:
                return read(name)
            scales = self._scales[weight]
            return scales if weight != name else requantize_blocks(read(name), scales)

        return self._stream.prove(read_sent)
