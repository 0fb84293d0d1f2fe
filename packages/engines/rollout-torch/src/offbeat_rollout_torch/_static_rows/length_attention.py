"""Attention of one new token of each row over the keys up to its own place, as torch.compile generates it.

A masked product reads as many places of every row as the longest row has, in one block per row and kv head. Here a
kernel of FlexAttention reads whole blocks of `KEY_BLOCK` keys, up to the one that holds the row's place, which it looks
up on the device. Where rows and kv heads are too few to fill the device, the blocks of a row are dealt out to splits,
which compute at the same time and whose results one more kernel joins.

FlexAttention has a kernel of its own for decoding, which is not used: its number of rows is a constant, so that it is
compiled once for each number of rows, and to join its splits takes two to three more kernels. And with
`torch.nn.attention.varlen`, lengths of keys come only with torch 2.13, for two formats, and not on processors.

Shapes: B rows of a step, H query heads, K kv heads, G = H / K, D head_dim, C places, N splits, M blocks of C places and
one more, R = B K rows and kv heads.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

KEY_BLOCK: Final = 128
"""Keys that are read or left out together; torch's default, a multiple of what its kernels load at a time."""
SPLITS: Final = (1, 4, 16)
"""The numbers of splits that there are graphs for."""
BLOCKS_TO_FILL: Final = 128
"""Blocks of a kernel that occupy a device: an H100 or H200 has 132 processors. Rows are split for so many."""
LEAST_QUERIES: Final = 16
"""Queries that a kernel computes at least at a time, the least that matrix units multiply. Torch takes 128, of which
only the G of one kv head would be used."""


def choose_splits(num_rows: int, num_kv_heads: int, choices: tuple[int, ...] = SPLITS) -> int:
    """Return the least number of splits that fills a device, or the largest there is.

    Args:
        num_rows: of the step.
        num_kv_heads: of the model.
        choices: ascending.
    """
    return next((n for n in choices if n * num_rows * num_kv_heads >= BLOCKS_TO_FILL), choices[-1])


def split_blocks(
    places_B: Tensor, num_kv_heads: int, num_splits: int, num_places: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Deal the blocks of keys of each row out to splits, in turns.

    Args:
        places_B: int64 place of each new token in its row.
        num_kv_heads: K.
        num_splits: N.
        num_places: C of each row, all that there are.

    Returns:
        [R] int64 places; [R, N] int32, how many blocks each split reads; [R, N, M] int32, which, and then numbers that
        are not read.
    """
    split_N = torch.arange(num_splits, dtype=torch.int32, device=places_B.device)
    # One more than a row has, never read: torch makes a graph of its own for a size of 1.
    turn_M = torch.arange(-(-num_places // KEY_BLOCK) + 1, dtype=torch.int32, device=places_B.device)
    places_R = places_B[:, None].expand(-1, num_kv_heads).flatten()
    last_R = (places_R // KEY_BLOCK).to(torch.int32)
    # Block s + N j is the j-th of split s, so those up to `last` are as many as j with s + N j <= last.
    counts_RN = (last_R[:, None] - split_N + num_splits) // num_splits
    blocks_RNM = (split_N[:, None] + num_splits * turn_M).expand(len(places_R), -1, -1)
    # Written out, though all rows are alike: the kernel takes them to lie densely.
    return places_R.contiguous(), counts_RN, blocks_RNM.contiguous()


def attend_by_length(
    queries_R1GD: Tensor,
    keys_R1CD: Tensor,
    values_R1CD: Tensor,
    places_R: Tensor,
    counts_RN: Tensor,
    blocks_RNM: Tensor,
) -> Tensor:
    """Attend with each row's query to its keys up to its place.

    Args:
        queries_R1GD: of one token of each row.
        keys_R1CD: of the rows; those of the new tokens are among them. Blocks behind a row's place are not read.
        values_R1CD: likewise.
        places_R: see `split_blocks`.
        counts_RN: see `split_blocks`.
        blocks_RNM: see `split_blocks`.

    Returns:
        [R, 1, G, D], of the queries' dtype.
    """
    num_splits, num_queries, num_places = counts_RN.shape[1], queries_R1GD.shape[2], keys_R1CD.shape[2]

    def is_seen(row: Tensor, split: Tensor, query: Tensor, place: Tensor) -> Tensor:
        seen = place <= places_R[row]
        return seen if num_splits == 1 else seen & (place // KEY_BLOCK % num_splits == split)

    mask = BlockMask.from_kv_blocks(
        counts_RN[..., None],
        blocks_RNM[:, :, None],
        BLOCK_SIZE=KEY_BLOCK,
        mask_mod=is_seen,
        seq_lengths=(num_queries, num_places),
        compute_q_blocks=False,
    )
    # The query heads of a kv head are the queries of one product, whatever their number, and splits are its heads.
    options: FlexKernelOptions = {"BLOCK_M": max(LEAST_QUERIES, 1 << (num_queries - 1).bit_length())}
    if num_splits == 1:
        out: Tensor = flex_attention(queries_R1GD, keys_R1CD, values_R1CD, block_mask=mask, kernel_options=options)
        return out
    parts, aux = flex_attention(
        queries_R1GD.expand(-1, num_splits, -1, -1),
        keys_R1CD,
        values_R1CD,
        block_mask=mask,
        enable_gqa=True,
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None  # it was asked for
    # Each element's own sums over splits, though all of a head are alike: so they are one kernel, and not three.
    sums = aux.lse[..., None].expand(parts.shape)
    weights = (sums - sums.logsumexp(1, keepdim=True)).exp()
    return (parts * weights).sum(1, keepdim=True).to(parts.dtype)
