"""Attention of a micro-batch by npu_fusion_attention, under the mask of its batch.

Text goes to the operator as a pack (layout TND): tokens end to end, the ends of the sequences, and the compressed
causal mask. A model with vision is computed in padded rows (layout BNSD) under a mask of its own, made together with
the padded ids. With context parallelism a rank holds some queries of each sequence and sees the keys up to them: packs
get a run for each range of queries, aligned with the end of its keys; rows keep the lines of the mask that belong to
the queries held.

Source: torch_npu 2.13.0, torch_npu/_op_plugin_docs.py, npu_fusion_attention; MindSpeed core_r0.16.0,
mindspeed/core/transformer/flash_attention (a mask is true where megatron-core's queries must not look).

Shapes: B sequences, S padded length, W queries of a row, T tokens of all sequences, Q queries of this rank, K keys of
all runs, H heads, G key heads, D head size.
"""

from itertools import accumulate, count

import torch
from torch import Tensor

from offbeat_core import ShapeError
from offbeat_device import AttendedTokens, MaskedAttention
from offbeat_npu._masks import compressed_mask, packed_batch, vision_batch
from offbeat_npu._operators import Operators


def shape_attention(tokens: AttendedTokens, operators: Operators, device: torch.device) -> MaskedAttention:
    """Return attention in rows for a model with vision, in a pack for one of text.

    Args:
        tokens: of the micro-batch.
        operators: of the platform.
        device: where queries and keys are.
    """
    kind = RowAttention if tokens.image_ids else PackAttention
    return kind(tokens, operators, device)


class PackAttention:
    """Attention over a pack: one call for all sequences, under the compressed causal mask.

    Args:
        tokens: of the micro-batch.
        operators: of the platform.
        device: where queries and keys are.

    Attributes:
        batch: ids and mask, which belong together.
        mask: [2048, 2048] bool, on the device.
    """

    def __init__(self, tokens: AttendedTokens, operators: Operators, device: torch.device) -> None:
        self.batch = packed_batch(_sequences(tokens), pad_id=0)
        self.mask = compressed_mask(device)
        self._operators = operators
        starts = (0, *self.batch.ends)
        runs = [(start, *held) for start, ranges in zip(starts, tokens.queries, strict=False) for held in ranges]
        self._query_ends = tuple(accumulate(end - begin for _, begin, end in runs))
        self._key_ends = tuple(accumulate(end for *_, end in runs))
        self._key_K: Tensor | None = None
        if self._key_ends != self.batch.ends:
            self._key_K = torch.cat([torch.arange(start, start + end) for start, _, end in runs]).to(device)

    def attend(
        self, query_QHD: Tensor, key_TGD: Tensor, value_TGD: Tensor, mask: Tensor | None, *, scale: float
    ) -> Tensor:
        """See `MaskedAttention.attend`."""
        mask = _checked(mask, self.mask)
        if self._key_K is not None:
            key_TGD, value_TGD = (each.index_select(0, self._key_K) for each in (key_TGD, value_TGD))
        found: Tensor = self._operators.npu_fusion_attention(
            query_QHD,
            key_TGD,
            value_TGD,
            query_QHD.shape[1],
            "TND",
            atten_mask=mask,
            scale=scale,
            actual_seq_qlen=self._query_ends,
            actual_seq_kvlen=self._key_ends,
            sparse_mode=self.batch.sparse_mode,
        )[0]
        return found


class RowAttention:
    """Attention over padded rows, a sequence each, under a mask for each row.

    Args:
        tokens: of the micro-batch, with the ids that stand for images.
        operators: of the platform.
        device: where queries and keys are.

    Attributes:
        batch: padded ids and mask, which belong together, and where images are.
        mask: [B, 1, W, S] bool, on the device; W is S unless other ranks hold queries too.
    """

    def __init__(self, tokens: AttendedTokens, operators: Operators, device: torch.device) -> None:
        pad_id = next(number for number in count() if number not in tokens.image_ids)
        self.batch = vision_batch(_sequences(tokens), vision_ids=tokens.image_ids, pad_id=pad_id)
        self._operators = operators
        num_rows, size = self.batch.ids_BS.shape
        held = [torch.cat([torch.arange(*each) for each in ranges]) for ranges in tokens.queries]
        lengths = torch.tensor([len(each) for each in held])
        width = int(lengths.max())
        lines = self.batch.hidden_B1SS
        if width < size:
            line_BW = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)  # lines of padding are never read
            lines = lines.gather(2, line_BW[:, None, :, None].expand(num_rows, 1, width, size))
        self.mask = lines.to(device)
        self._query_Q = _places(lengths, width).to(device)
        self._key_T = _places(torch.tensor(tokens.lengths), size).to(device)

    def attend(
        self, query_QHD: Tensor, key_TGD: Tensor, value_TGD: Tensor, mask: Tensor | None, *, scale: float
    ) -> Tensor:
        """See `MaskedAttention.attend`."""
        mask = _checked(mask, self.mask)
        num_rows, _, width, size = mask.shape
        query = _in_rows(query_QHD, self._query_Q, num_rows, width)
        key, value = (_in_rows(each, self._key_T, num_rows, size) for each in (key_TGD, value_TGD))
        found_BHWD: Tensor = self._operators.npu_fusion_attention(
            query,
            key,
            value,
            query_QHD.shape[1],
            "BNSD",
            atten_mask=mask,
            scale=scale,
            sparse_mode=self.batch.sparse_mode,
        )[0]
        return found_BHWD.transpose(1, 2).flatten(0, 1).index_select(0, self._query_Q)


def _sequences(tokens: AttendedTokens) -> list[list[int]]:
    return [each.tolist() for each in torch.split(tokens.ids_T, list(tokens.lengths))]


def _checked(given: Tensor | None, wanted: Tensor) -> Tensor:
    if given is None or given.shape != wanted.shape:
        got = "none" if given is None else f"{list(given.shape)}"
        raise ShapeError(
            f"attention on NPUs needs the mask {list(wanted.shape)} that was made with the ids of this micro-batch, "
            f"got {got}: hand `MaskedAttention.mask` to every layer as its attention mask"
        )
    return given


def _places(lengths: Tensor, width: int) -> Tensor:
    """Index of each real token among rows of this width laid end to end, row after row."""
    return (torch.arange(width) < lengths[:, None]).flatten().nonzero().flatten()


def _in_rows(x_NHD: Tensor, place_N: Tensor, num_rows: int, width: int) -> Tensor:
    """[B, H, W, D], zero where there is padding."""
    padded = x_NHD.new_zeros(num_rows * width, *x_NHD.shape[1:]).index_copy(0, place_N, x_NHD)
    return padded.reshape(num_rows, width, *x_NHD.shape[1:]).transpose(1, 2)
