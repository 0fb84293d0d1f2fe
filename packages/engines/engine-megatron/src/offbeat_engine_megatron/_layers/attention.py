"""Attention over packs, its norms, and multi-latent attention.

Every context parallel rank gathers keys and values, and attends with the queries it holds; the gradient of
what was gathered is added up over the ranks that used it. megatron-core's local layer computes neither packs nor cp.
Source: Megatron-LM, megatron/core/transformer/dot_product_attention.py (the interface) and context parallelism by
all-gather, Llama 3 (arXiv:2407.21783), section 3.3.2.

Multi-latent attention makes queries, keys and values from a few numbers of each token (DeepSeek-V2, arXiv:2405.04434).
The projections to these numbers are whole on every rank of tp, which computes them for its own tokens. megatron-core's
local layers cut them, gather the numbers, and hand each rank the gradient of its own part alone: of the part of the
keys that all heads share, the gradient from other ranks' heads is lost (0.16.1, multi_latent_attention.py:
`gather_from_tensor_model_parallel_region`). TransformerEngine's layers do not cut them either.

Shapes: L tokens of this rank, T of all, H query heads and K key heads of this rank, D head size, E hidden size, t
tokens and K experts of a layer's router, F frequencies, O outputs.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from offbeat_core import ShapeError
from offbeat_device import MaskedAttention
from offbeat_engine_megatron._packing import CausalRuns, attend, causal_runs


class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's parameters of a pack, with what the local attention reads beside them.

    Args:
        lengths: of the whole sequences, each a multiple of twice the context parallel ranks.
        gathered_T: for each packed token its place in the ranks' tokens laid end to end; None for one rank.
        device: where the boundaries lie.
        kernel: of attention, see `attend`; TransformerEngine's needs none of these.
        masked: the device's own attention, in place of that kernel; its mask travels as the layers' attention mask.
        routes_tLK: experts to take of each token that a layer's router sees on this rank; None where they choose.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        gathered_T: Tensor | None,
        device: torch.device,
        kernel: str,
        masked: MaskedAttention | None = None,
        routes_tLK: Tensor | None = None,
    ) -> None:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        self.lengths, self.kernel, self.masked, self.routes_tLK = lengths, kernel, masked, routes_tLK
        self.gathered_T, self._device = gathered_T, device
        self._runs: CausalRuns | None = None

    def runs(self, cp_group: Any) -> CausalRuns:
        """Return the runs of this rank of the group; made by the first layer that asks."""
        if self._runs is None:
            self._runs = causal_runs(self.lengths, self.gathered_T, cp_group.rank(), cp_group.size(), self._device)
        return self._runs


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence of a pack. Takes the arguments that megatron-core gives its own."""

    def __init__(self, config: Any, layer_number: int, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.scale = kwargs.get("softmax_scale") or config.kv_channels**-0.5

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
        """[L, H · D]: what each query of this rank found."""
        cp, lengths = self.cp_group.size(), packed_seq_params.lengths
        if len(query_LHD) * cp != sum(lengths) or (cp > 1 and any(length % (2 * cp) for length in lengths)):
            raise ShapeError(
                f"each sequence of a pack needs a multiple of {2 * cp} tokens, and this rank holds 1 in {cp} of them: "
                f"got lengths {lengths} and {len(query_LHD)} tokens"
            )
        if packed_seq_params.masked is not None:
            order_T = packed_seq_params.gathered_T
            if order_T is not None:
                key_LKD, value_LKD = (self._gather(each, order_T) for each in (key_LKD, value_LKD))
            attention: MaskedAttention = packed_seq_params.masked
            return attention.attend(query_LHD, key_LKD, value_LKD, attention_mask, scale=self.scale).flatten(1)
        runs = packed_seq_params.runs(self.cp_group)
        if runs.key_K is not None:
            key_LKD, value_LKD = (self._gather(each, runs.key_K) for each in (key_LKD, value_LKD))
        kernel = packed_seq_params.kernel
        return attend(query_LHD, key_LKD, value_LKD, runs, scale=self.scale, kernel=kernel).flatten(1)

    def _gather(self, x_LKD: Tensor, key_K: Tensor) -> Tensor:
        """Return, of all ranks' tokens, those that this rank's runs see."""
        everywhere: Tensor = gather_from_sequence_parallel_region(x_LKD, group=self.cp_group)  # backward adds up
        return everywhere.index_select(0, key_K)


class SequenceNorm(torch.nn.RMSNorm):
    """RMS norm whose gradient megatron-core adds up over ranks that each saw some of the tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        marks: Any = self.weight
        marks.sequence_parallel = config.sequence_parallel


class WholeLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """megatron-core's attention, with whole projections to latent numbers and the angles of this engine.

    Norms of latent numbers have an epsilon of 1e-6, whatever that of the model is. Source: `DeepseekV3Attention` of
    transformers 5.19.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
            self.q_layernorm.eps = 1e-6
        self.kv_layernorm.eps = 1e-6
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.rotary_pos_emb = PackAngles()


class WholeLinear(MegatronModule):  # type: ignore[misc]
    """A linear layer that every rank of tp holds whole, and computes for the tokens that it holds."""

    def __init__(self, config: Any, num_outputs: int) -> None:
        super().__init__(config=config)
        like = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = nn.Parameter(torch.empty(num_outputs, config.hidden_size, **like))
        marks: Any = self.weight
        marks.sequence_parallel = config.sequence_parallel  # its gradient is added up over tp

    def forward(self, hidden_L1E: Tensor) -> tuple[Tensor, None]:
        """[L, 1, O], and no bias."""
        return nn.functional.linear(hidden_L1E, self.weight), None


class PackAngles(nn.Module):
    """Angles of the longest sequence of a pack, which megatron-core takes for each; its own class caches every model.

    Attributes:
        frequencies_F: float32, set when the model is made.
    """

    frequencies_F: Tensor

    def get_rotary_seq_len(self, context: Any, transformer: Any, hidden: Any, config: Any, packed: Any) -> int:
        """Return how many positions there are."""
        return int(packed.max_seqlen_q)

    def forward(self, length: int, *, packed_seq: bool) -> Tensor:
        """[length, 1, 1, 2 F]."""
        positions = torch.arange(length, device=self.frequencies_F.device, dtype=torch.float32)
        angles = positions[:, None] * self.frequencies_F
        return torch.cat([angles, angles], -1)[:, None, None]
