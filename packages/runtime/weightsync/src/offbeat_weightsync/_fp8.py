"""FP8 weights: blocks of 128 × 128 in e4m3, with a float32 scale for each block.

e4m3 has 3 bits of mantissa, normal numbers from 2^-6 to 448, and steps of 2^-9 below that. A block is divided by its
scale, amax / 448, and rounded to nearest; so an element is off by at most half a step of its own size:

    |w - q s| <= max(|w| 2^-4, s 2^-10)

Source: FP8 Formats for Deep Learning (arXiv:2209.05433), table 1; the block layout and the name "weight_scale_inv" are
those of DeepSeek-V3 (arXiv:2412.19437, section 3.3; its inference/kernel.py), which vLLM reads.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from offbeat_core import TensorSpec, WeightProof, WeightStream, WeightSyncError

BLOCK: Final = 128
MAX_E4M3: Final = 448.0
SMALLEST_SCALE: Final = 2.0**-126
"""float32's smallest normal number, so that no scale is zero or denormal."""
SCALE_SUFFIX: Final = "_scale_inv"


def quantize_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix in blocks of 128 × 128; those at the lower and right edges may be smaller.

    Args:
        weight_OI: [O, I] any floating-point dtype, finite.

    Returns:
        [O, I] float8_e4m3fn, and [ceil(O / 128), ceil(I / 128)] float32, by which to multiply to get the weight back.

    Raises:
        WeightSyncError: it is no matrix, or holds infinities or NaN.
    """
    if weight_OI.dim() != 2:
        raise WeightSyncError(f"block quantisation needs a matrix: got shape {tuple(weight_OI.shape)}")
    weight = weight_OI.detach().float()
    blocks = _blocks(weight)
    amax = blocks.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(amax).all()):
        raise WeightSyncError("block quantisation needs finite weights: got infinities or NaN")
    scales = (amax / MAX_E4M3).clamp_min(SMALLEST_SCALE)
    return _round(blocks, scales, weight), scales


def requantize_blocks(weight_OI: Tensor, scales: Tensor) -> Tensor:
    """Quantise by scales that are given: of what `dequantize_blocks` gave, the very blocks it was made from."""
    weight = weight_OI.detach().float()
    return _round(_blocks(weight), scales.to(weight.device), weight)


def dequantize_blocks(quantized_OI: Tensor, scales: Tensor) -> Tensor:
    """Return what `quantize_blocks` stands for: [O, I] float32."""
    return quantized_OI.float() * _spread(scales, quantized_OI)


def is_fp8_weight(spec: TensorSpec) -> bool:
    """Return whether a tensor is quantised by default: matrices of at least a block within the layers.

    No table, no head.
    """
    tables = ("embed_tokens.weight", "pos_embed.weight", "lm_head.weight")
    fits = len(spec.shape) == 2 and min(spec.shape) >= BLOCK and spec.name.endswith(".weight")
    return fits and not spec.name.endswith(tables)


def fp8_specs(specs: Iterable[TensorSpec], select: Callable[[TensorSpec], bool] = is_fp8_weight) -> list[TensorSpec]:
    """Return the specs of what `quantize_tensors` yields: after each quantised weight comes its scale."""
    return [each for spec in specs for each in ([spec] if not select(spec) else _fp8_pair(spec))]


def quantize_tensors(
    tensors: Iterable[tuple[str, Tensor]], select: Callable[[TensorSpec], bool] = is_fp8_weight
) -> Iterator[tuple[str, Tensor]]:
    """Quantise the selected ones of the trainer's tensors on their way; one at a time is held."""
    for name, tensor in tensors:
        if select(TensorSpec(name, "float32", tuple(tensor.shape))):
            quantized, scales = quantize_blocks(tensor)
            yield name, quantized
            yield name + SCALE_SUFFIX, scales
        else:
            yield name, tensor


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


def _fp8_pair(spec: TensorSpec) -> list[TensorSpec]:
    grid = tuple(-(-size // BLOCK) for size in spec.shape)
    return [TensorSpec(spec.name, "float8_e4m3fn", spec.shape), TensorSpec(spec.name + SCALE_SUFFIX, "float32", grid)]


def _round(blocks: Tensor, scales: Tensor, like: Tensor) -> Tensor:
    """[O, I] float8_e4m3fn of blocks in the layout of `_blocks`."""
    # Division may round the largest element to just above 448, which e4m3fn cannot hold.
    scaled = (blocks / scales[:, None, :, None]).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return _unblock(scaled.view(torch.uint8), like).view(torch.float8_e4m3fn)


def _blocks(matrix: Tensor) -> Tensor:
    """[rows of blocks, 128, columns of blocks, 128], edges filled with zeros."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _unblock(blocks: Tensor, like: Tensor) -> Tensor:
    rows, columns = like.shape
    return blocks.reshape(blocks.shape[0] * BLOCK, -1)[:rows, :columns].contiguous()


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    """Each block's scale at each of its elements."""
    rows, columns = like.shape
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
