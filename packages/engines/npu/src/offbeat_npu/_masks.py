"""Batches as the platform's attention kernels want them: ids and mask padded to one shape, and never apart.

A mask is true where a query must not look. Every query sees itself, padding too, so no row of scores is empty and no
softmax is NaN. Source: torch_npu 2.13.0, torch_npu/_op_plugin_docs.py, npu_fusion_attention (atten_mask, sparse_mode,
actual_seq_qlen).

Shapes: B sequences, S padded length, T tokens of a pack.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Final

import torch
from torch import Tensor

from offbeat_core import ConfigError, ShapeError

DENSE: Final = 0
"""sparse_mode: the mask is given whole."""

RIGHT_DOWN_CAUSAL: Final = 3
"""sparse_mode: causal, aligned at the last query and the last key, by a compressed mask."""

COMPRESSED: Final = 2048
"""Rows and columns of the compressed mask."""


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Sequences padded on the right, with the mask that belongs to them.

    Args:
        ids_BS: int64 token ids.
        hidden_B1SS: bool, true where query i must not look at key j.
        lengths: real tokens of each sequence.

    Raises:
        ShapeError: the shapes do not belong together.
    """

    ids_BS: Tensor
    hidden_B1SS: Tensor
    lengths: tuple[int, ...]
    sparse_mode = DENSE

    def __post_init__(self) -> None:
        rows, length = self.ids_BS.shape
        if self.hidden_B1SS.shape != (rows, 1, length, length) or len(self.lengths) != rows:
            raise ShapeError(
                f"ids [{rows}, {length}] need a mask [{rows}, 1, {length}, {length}] and {rows} lengths, got "
                f"{list(self.hidden_B1SS.shape)} and {len(self.lengths)}: pad both together"
            )


@dataclass(frozen=True, eq=False)
class VisionBatch(PaddedBatch):
    """A padded batch of prompts with images.

    Args:
        vision_BS: bool, true where the id stands for a patch of an image or video.
    """

    vision_BS: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vision_BS.shape != self.ids_BS.shape:
            raise ShapeError(
                f"vision_BS must be {list(self.ids_BS.shape)} like the ids, got {list(self.vision_BS.shape)}"
            )


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Sequences one after the other, causal each on its own.

    Args:
        ids_T: int64 token ids.
        ends: where each sequence ends: [2, 4, 6] for three of 2 tokens; what padding adds is a sequence of its own.
        hidden: [2048, 2048] bool, the compressed mask: true above the diagonal.
        num_sequences: without the padding.
    """

    ids_T: Tensor
    ends: tuple[int, ...]
    hidden: Tensor
    num_sequences: int
    sparse_mode = RIGHT_DOWN_CAUSAL

    def __post_init__(self) -> None:
        increasing = all(start < end for start, end in pairwise((0, *self.ends)))
        if not increasing or self.ends[-1:] != (len(self.ids_T),) or self.hidden.shape != (COMPRESSED, COMPRESSED):
            raise ShapeError(
                f"{len(self.ids_T)} packed ids need increasing ends, the last {len(self.ids_T)}, and a mask "
                f"[{COMPRESSED}, {COMPRESSED}]; got ends {self.ends} and {list(self.hidden.shape)}"
            )


def dense_batch(sequences: Sequence[Sequence[int]], *, pad_id: int, multiple_of: int = 1) -> PaddedBatch:
    """Pad sequences to one length, causal.

    Args:
        sequences: token ids of each; none empty.
        pad_id: what padding holds.
        multiple_of: of the padded length: tp with sequence parallel, 2·cp·tp with context parallel.

    Raises:
        ConfigError: no sequences, or an empty one.
    """
    lengths = _lengths(sequences)
    size = _round_up(max(lengths), multiple_of)
    ids = torch.full((len(lengths), size), pad_id, dtype=torch.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    place = torch.arange(size)
    is_real = place < torch.tensor(lengths)[:, None]
    # What a real token sees is real: padding comes after it.
    seen = (place <= place[:, None]) & is_real[:, :, None] | torch.eye(size, dtype=torch.bool)
    return PaddedBatch(ids, ~seen[:, None], lengths)


def vision_batch(
    sequences: Sequence[Sequence[int]], *, vision_ids: Collection[int], pad_id: int, multiple_of: int = 1
) -> VisionBatch:
    """As `dense_batch`, and which ids are places of images: what a model with vision under Megatron is fed.

    Args:
        sequences: with one placeholder id for each patch, as a processor gives them.
        vision_ids: the placeholder ids of images and videos.
        pad_id: must be none of `vision_ids`: padding would be taken for an image.
        multiple_of: as for `dense_batch`.

    Raises:
        ConfigError: as `dense_batch`, or `pad_id` stands for an image.
    """
    if pad_id in vision_ids:
        raise ConfigError(f"pad_id {pad_id} is a placeholder of images ({sorted(vision_ids)}): choose another")
    batch = dense_batch(sequences, pad_id=pad_id, multiple_of=multiple_of)
    is_vision = torch.isin(batch.ids_BS, torch.tensor(sorted(vision_ids), dtype=torch.int64))
    return VisionBatch(batch.ids_BS, batch.hidden_B1SS, batch.lengths, is_vision)


def packed_batch(sequences: Sequence[Sequence[int]], *, pad_id: int, multiple_of: int = 1) -> PackedBatch:
    """Sequences one after the other, without padding between them.

    Args:
        sequences: token ids of each; none empty.
        pad_id: what fills the pack up, as a last sequence of its own.
        multiple_of: of all tokens together.

    Raises:
        ConfigError: no sequences, or an empty one.
    """
    lengths = _lengths(sequences)
    num_tokens = sum(lengths)
    padding = _round_up(num_tokens, multiple_of) - num_tokens
    ends = accumulate((*lengths, padding) if padding else lengths)
    flat = [*chain.from_iterable(sequences), *[pad_id] * padding]
    return PackedBatch(torch.tensor(flat, dtype=torch.int64), tuple(ends), compressed_mask(), len(lengths))


@cache
def compressed_mask(device: torch.device | None = None) -> Tensor:
    """Return the mask of every pack: [2048, 2048] bool, true above the diagonal; not to be written to."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1).to(device)


def _lengths(sequences: Sequence[Sequence[int]]) -> tuple[int, ...]:
    lengths = tuple(len(sequence) for sequence in sequences)
    if not lengths or min(lengths) == 0:
        raise ConfigError(f"a batch needs sequences of at least one token, got lengths {list(lengths)}")
    return lengths


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
