"""Attention over packed sequences, in megatron-core's layer spec: the local one computes neither packs nor cp.

Every context parallel rank gathers keys and values, and attends with the queries it holds; the gradient of what was
gathered is added up over the ranks that used it.
Source: Megatron-LM, megatron/core/transformer/dot_product_attention.py (the interface) and context parallelism by
all-gather, Llama 3 (arXiv:2407.21783), section 3.3.2.

Shapes: L tokens of this rank, T of all, H query heads and K key heads of this rank, D head size.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offbeat_types import ShapeError


class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's parameters of a pack, with what the local attention reads beside them.

    Args:
        lengths: of the whole sequences, each a multiple of twice the context parallel ranks.
        gathered_T: for each packed token its place in the ranks' tokens laid end to end; None for one rank.
        device: where the boundaries lie.
    """

    def __init__(self, lengths: tuple[int, ...], gathered_T: Tensor | None, device: torch.device) -> None:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        self.lengths, self.gathered_T = lengths, gathered_T


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence of a pack. Takes the arguments that megatron-core gives its own."""

    def __init__(self, config: Any, layer_number: int, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query_LHD: Tensor,
        key_LKD: Tensor,
        value_LKD: Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[L, H · D]: what each query of this rank found.

        Raises:
            ShapeError: the tokens of this rank are not its share of the pack.
        """
        cp, lengths = self.cp_group.size(), packed_seq_params.lengths
        if len(query_LHD) * cp != sum(lengths) or (cp > 1 and any(length % (2 * cp) for length in lengths)):
            raise ShapeError(
                f"each sequence of a pack needs a multiple of {2 * cp} tokens, of which this rank holds 1 in {cp}: "
                f"got lengths {lengths} and {len(query_LHD)} tokens"
            )
        if cp > 1:
            key_LKD = self._gather(key_LKD, packed_seq_params.gathered_T)
            value_LKD = self._gather(value_LKD, packed_seq_params.gathered_T)
        heads = query_LHD.shape[1] // key_LKD.shape[1]
        key, value = (torch.split(each.repeat_interleave(heads, 1), list(lengths)) for each in (key_LKD, value_LKD))
        query = torch.split(query_LHD, [length // cp for length in lengths])
        parts = [self._attend(*each) for each in zip(query, key, value, strict=True)]
        return torch.cat(parts).flatten(1)

    def _gather(self, x_LKD: Tensor, gathered_T: Tensor) -> Tensor:
        """All ranks' tokens, in the order of the pack."""
        everywhere: Tensor = gather_from_sequence_parallel_region(x_LKD, group=self.cp_group)  # backward adds up
        return everywhere.index_select(0, gathered_T)

    def _attend(self, query_lHD: Tensor, key_tHD: Tensor, value_tHD: Tensor) -> Tensor:
        """One sequence: [l, H, D]."""
        query, key, value = (each.transpose(0, 1)[None] for each in (query_lHD, key_tHD, value_tHD))
        whole = len(query_lHD) == len(key_tHD)
        mask = None if whole else self._mask(len(query_lHD), len(key_tHD), query_lHD.device)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole, scale=self.scale)
        return out[0].transpose(0, 1)

    def _mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """[l, t] bool: which keys the queries of this rank's two chunks may see."""
        cp, rank, chunk = self.cp_group.size(), self.cp_group.rank(), num_queries // 2
        within = torch.arange(chunk, device=device)
        position = torch.cat([rank * chunk + within, (2 * cp - 1 - rank) * chunk + within])
        return position[:, None] >= torch.arange(num_keys, device=device)[None]


class SequenceNorm(torch.nn.RMSNorm):
    """RMS norm that tells megatron-core to add up its gradient over ranks that each saw some of the tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        marks: Any = self.weight
        marks.sequence_parallel = config.sequence_parallel
