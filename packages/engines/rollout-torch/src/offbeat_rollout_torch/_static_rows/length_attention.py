"""Attention of one new token of each row over the keys up to its own place, as torch.compile generates it.

A masked product reads as many places of every row as the longest row has, in one block per row and kv head. Here a
kernel of FlexAttention reads whole blocks of `KEY_BLOCK` keys, up to the one that holds the row's place, which it looks
up on the device. Where rows and kv heads are too few to fill the device, the blocks of a row are dealt out to splits,
which compute at the same time and whose results one more kernel joins.

FlexAttention has a kernel of its own for decoding, which is not used: its number of rows is a constant, so that it is
compiled once for each number of rows, and to join its splits takes two to three more kernels. And with
`torch.nn.attention.varlen`, lengths of keys come only with torch 2.13, for two formats, and not on processors.

Prompts are attended by the same kernel, in segments of tokens of one row (see `prefill`). The keys of all rows and kv
heads are one sequence to it, of which each segment and head reads the blocks that hold keys of its own row, up to the
place of the segment's last token. So a pass's attention is one kernel too, whichever rows it is for.

Shapes: B rows of a step, H query heads, K kv heads, G = H / K, D head_dim, C places, N splits, M blocks of C places and
one more, R = B K rows and kv heads; Z segments of a pass, T tokens of a segment, P keys of all rows and kv heads.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from offbeat_rollout_torch._cache import Block

KEY_BLOCK: Final = 128
"""Keys that are read or left out together; torch's default, a multiple of what its kernels load at a time."""
SPLITS: Final = (1, 4, 16)
"""The numbers of splits that there are graphs for."""
BLOCKS_TO_FILL: Final = 128
"""Blocks of a kernel that occupy a device: an H100 or H200 has 132 processors. Rows are split for so many."""
LEAST_QUERIES: Final = 16
"""Queries that a kernel computes at least at a time, the least that matrix units multiply. Torch takes 128, of which
only the G of one kv head would be used."""

SEGMENT_QUERIES: Final = {torch.float32: 32}
"""Queries of a segment that a kernel computes at a time, where all 64 would need too much of a processor's memory: in
float32, with 3 stages of 64 keys and values of 128 elements, 224 KiB beside what sums take, of the 227 of an H100."""


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


def segment_blocks(
    slots_Z: Tensor, ends_Z: Tensor, num_heads: int, num_kv_heads: int, num_places: int, num_listed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """List the blocks of keys that each segment and head reads.

    Args:
        slots_Z: int64, of the row of each segment.
        ends_Z: int64 place of the last token of each segment.
        num_heads: H.
        num_kv_heads: K.
        num_places: C of each row, all that there are.
        num_listed: blocks in a list, see `count_listed`.

    Returns:
        [Z, H] int32, where the row's keys begin among all keys; [Z, H, 1] int32, how many blocks are read; [Z, H, 1,
        num_listed] int32, which, and then numbers that are not read.
    """
    kv_head_H = torch.arange(num_heads, device=slots_Z.device) // (num_heads // num_kv_heads)
    first_ZH = (slots_Z[:, None] * num_kv_heads + kv_head_H) * num_places
    first_block_ZH = first_ZH // KEY_BLOCK
    counts_ZH = (first_ZH + ends_Z[:, None]) // KEY_BLOCK - first_block_ZH + 1
    blocks_ZHM = first_block_ZH[..., None] + torch.arange(num_listed, device=slots_Z.device)
    first_ZH, counts_ZH, blocks_ZHM = (each.to(torch.int32) for each in (first_ZH, counts_ZH, blocks_ZHM))
    return first_ZH, counts_ZH[..., None], blocks_ZHM[:, :, None].contiguous()


def count_listed(block: Block) -> int:
    """Return how many blocks of keys a list of `segment_blocks` has room for: one row's of a block of rows.

    The kernel for processors takes no list that is shorter than all keys.
    """
    _, _, num_rows, num_kv_heads, num_places, _ = block.kv.shape
    if block.kv.is_cpu:
        return -(-num_rows * num_kv_heads * num_places // KEY_BLOCK)
    return -(-num_places // KEY_BLOCK) + 1  # a row's keys may begin within a block, and so lie in one more


def attend_segments(
    queries_ZHTD: Tensor,
    keys_11PD: Tensor,
    values_11PD: Tensor,
    places_ZT: Tensor,
    first_ZH: Tensor,
    counts_ZH1: Tensor,
    blocks_ZH1M: Tensor,
) -> Tensor:
    """Attend with each token of a segment to the keys of its row up to its place.

    Args:
        queries_ZHTD: of the segments' tokens.
        keys_11PD: of all rows and kv heads, one behind the other; those of the segments are among them.
        values_11PD: likewise.
        places_ZT: int64 place of each token in its row.
        first_ZH: see `segment_blocks`.
        counts_ZH1: see `segment_blocks`.
        blocks_ZH1M: see `segment_blocks`.

    Returns:
        [Z, H, T, D], of the queries' dtype.
    """
    num_queries, num_keys = queries_ZHTD.shape[2], keys_11PD.shape[2]

    def is_seen(segment: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key - first_ZH[segment, head]
        return (place >= 0) & (place <= places_ZT[segment, query])

    mask = BlockMask.from_kv_blocks(
        counts_ZH1,
        blocks_ZH1M,
        BLOCK_SIZE=(num_queries, KEY_BLOCK),
        mask_mod=is_seen,
        seq_lengths=(num_queries, num_keys),
        compute_q_blocks=False,
    )
    # Four warps, as torch has it for 64 queries: its tables have eight for 128.
    options: FlexKernelOptions = {
        "BLOCK_M": SEGMENT_QUERIES.get(queries_ZHTD.dtype, num_queries),
        "num_warps": 4,
    }
    out: Tensor = flex_attention(
        queries_ZHTD, keys_11PD, values_11PD, block_mask=mask, enable_gqa=True, kernel_options=options
    )
    return out
