"""Changes to megatron-core's layers: packed attention, experts, norms, the padding id, the vision
tower, and the loss of multi-token prediction.

Attention: every context parallel rank gathers keys and values, and attends with the queries it holds; the gradient of
what was gathered is added up over the ranks that used it. megatron-core's local layer computes neither packs nor cp.
Source: Megatron-LM, megatron/core/transformer/dot_product_attention.py (the interface) and context parallelism by
all-gather, Llama 3 (arXiv:2407.21783), section 3.3.2.

Images: every rank of tp runs the whole tower (transformers' own module) on the images of its pack, and continues with
the tokens that it holds. The backward pass brings the gradient of all tokens back to each of them, so that none is a
part of the whole, and none is added up over tp. Ranks of dp and cp see other images or other tokens: their gradients
are added up with all others.

Multi-token prediction: layer k gets the hidden states of the layer before it (k = 1: of the model) and the embedding of
the token k places on, and predicts the token after that one, with the model's own embedding and head. The layers are
megatron-core's. Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2;
megatron/core/transformer/multi_token_prediction.py.

Shapes: L tokens of this rank, T of all, H query heads and K key heads of this rank, D head size, E hidden size, m
placeholder tokens of this rank; K layers of DeepStack; n predictors on this rank; X experts of this rank, F their
width, S tokens sent to them.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from offbeat_core import Metric, Metrics, ShapeError, TrainSequence
from offbeat_device import MaskedAttention
from offbeat_engine_megatron._layout import MegatronEngineOptions
from offbeat_engine_megatron._packing import CausalRuns, MtpInputs, PassInputs, attend, causal_runs
from offbeat_engine_megatron._weights import Slot
from offbeat_mesh import Group, Mesh
from offbeat_training import ImageProcessor


class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's parameters of a pack, with what the local attention reads beside them.

    Args:
        lengths: of the whole sequences, each a multiple of twice the context parallel ranks.
        gathered_T: for each packed token its place in the ranks' tokens laid end to end; None for one rank.
        device: where the boundaries lie.
        kernel: of attention, see `attend`; TransformerEngine's needs none of these.
        masked: the device's own attention, in place of that kernel; its mask travels as the layers' attention mask.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        gathered_T: Tensor | None,
        device: torch.device,
        kernel: str,
        masked: MaskedAttention | None = None,
    ) -> None:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        self.lengths, self.kernel, self.masked = lengths, kernel, masked
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


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The experts of a rank in grouped products of torch. Takes the arguments that megatron-core gives its own.

    Not megatron-core's GroupedMLP: that one wants another package for its product, and computes in bfloat16 alone.
    """

    def __init__(self, num_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        like = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight1 = nn.Parameter(torch.empty(num_experts, 2 * size, hidden, **like))  # gate, up
        self.weight2 = nn.Parameter(torch.empty(num_experts, hidden, size, **like))
        for weight in (self.weight1, self.weight2):  # as on each expert's own: every rank's part of the norm counts
            tensor_parallel.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x_SE: Tensor, tokens_per_expert: Tensor, weight_S: Tensor) -> tuple[Tensor, None]:
        """[S, E]: what each expert makes of its tokens, which stand together, times what the router gives it."""
        ends_X = tokens_per_expert.cumsum(0).to(x_SE.device, torch.int32)
        gate_SF, up_SF = grouped_mm(x_SE, self.weight1.transpose(1, 2), offs=ends_X).chunk(2, -1)
        inner_SF = (silu(gate_SF) * up_SF * weight_S[:, None]).to(x_SE.dtype)
        return grouped_mm(inner_SF, self.weight2.transpose(1, 2), offs=ends_X), None


class SequenceNorm(torch.nn.RMSNorm):
    """RMS norm whose gradient megatron-core adds up over ranks that each saw some of the tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        marks: Any = self.weight
        marks.sequence_parallel = config.sequence_parallel


def leave_out_padding(embedding: nn.Module, padding_id: int, tp: Group, *, cuts_tokens: bool) -> None:
    """Let no gradient flow into the row of `padding_id` from tokens that have it; a tied head still trains it.

    Of ids [1, L] the embedding answers [L, 1, E], or with `cuts_tokens` (sequence parallel) this rank's part of the L.
    Source: transformers' models make their table with `padding_idx` (torch.nn.Embedding).
    """

    def detach(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        ids_L: Tensor = kwargs["input_ids"][0]
        own_L = ids_L.chunk(tp.size)[tp.rank] if cuts_tokens else ids_L
        return torch.where((own_L == padding_id)[:, None, None], output.detach(), output)

    embedding.register_forward_hook(detach, with_kwargs=True)


def make_tower(hf_config: Any, config: Any, device: torch.device, *, trained: bool) -> Any:
    """Return a vision tower without weights yet, the whole of it on every rank; `config` is megatron-core's."""
    from transformers import AutoModel

    with torch.device(device):
        tower = AutoModel.from_config(hf_config.vision_config, dtype=config.params_dtype, attn_implementation="sdpa")
    if config.recompute_granularity is not None:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    tower.requires_grad_(requires_grad=trained)
    for parameter in tower.parameters():
        # Ranks of tp compute the same gradient, up to the order in which a device adds up: their mean keeps them alike.
        parameter.average_gradients_across_tp_domain = True
    return tower


def embed_images(
    tower: Any, asked: PassInputs, embeds_L1E: Tensor, *, tp: Group, cuts_tokens: bool
) -> tuple[Tensor, Tensor | None]:
    """Embeddings with what the tower sees in the places of images; and [L, K, E] for the first layers, if there are K.

    Patches without a place in the text are not used, but they are part of the graph: the backward pass goes through
    the tower, with gradients of zero.

    Args:
        tower: of transformers.
        asked: of the pack, with pixels.
        embeds_L1E: of this rank's tokens; with `cuts_tokens` those that it holds of L.
        tp: the ranks that share the pack.
        cuts_tokens: sequence parallel.
    """
    assert asked.pixels_PC is not None
    seen = tower(asked.pixels_PC.to(tower.dtype), grid_thw=asked.grid_I3)
    layers = torch.stack([seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())], 1)
    num_tokens = len(embeds_L1E) * (tp.size if cuts_tokens else 1)
    empty = layers.new_zeros(num_tokens, *layers.shape[1:])
    found = empty.index_copy(0, asked.place_m, layers.index_select(0, asked.seen_m)).to(embeds_L1E.dtype)
    marked = torch.zeros(num_tokens, dtype=torch.bool, device=found.device).index_fill(0, asked.place_m, value=True)
    if cuts_tokens:
        found = scatter_to_sequence_parallel_region(found, group=tp.process_group)
        marked = marked.chunk(tp.size)[tp.rank]
    embeds_L1E = torch.where(marked[:, None, None], found[:, :1], embeds_L1E)
    return embeds_L1E, found[:, 1:] if found.shape[1] > 1 else None


def add_deepstack(number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """DeepStack. What is added is the layers' `context`: megatron-core hands it on, and recomputes with it.

    Source: `_deepstack_process` of transformers' Qwen3VLTextModel; megatron/core/transformer/transformer_layer.py.
    """
    deeper_LKE = kwargs.get("context")
    if deeper_LKE is None:
        return output
    hidden_L1E, context = output
    return hidden_L1E + deeper_LKE[:, number, None], context


_INSTALL: Final = 'pip install "offbeat-engine-megatron[vision]"'


def image_processor(hf_config: Any, model_path: str) -> ImageProcessor:
    """Image processor of a vision-language model of the Qwen-VL families."""

    @cache
    def outline() -> Any:
        """Return the model of transformers without memory: it computes positions from its configuration."""
        from transformers import AutoModel

        with torch.device("meta"):
            return AutoModel.from_config(hf_config)

    def rope_index(*args: Any, **kwargs: Any) -> Any:
        return outline().get_rope_index(*args, **kwargs)

    return ImageProcessor(hf_config, model_path, rope_index, _INSTALL)


def mtp_block_spec(layer: ModuleSpec, num_layers: int) -> MultiTokenPredictionBlockSubmodules:
    """megatron-core's layers, around transformer layers like the model's."""
    spec = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=SequenceNorm,
            hnorm=SequenceNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=SequenceNorm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * num_layers)


def new_mtp_tensors(slots: Iterable[Slot], *, seed: int, std: float) -> Iterator[tuple[str, Tensor]]:
    """(name, first values) of each tensor, the same on all ranks and in every layout: norms one, biases zero, matrices
    normal with this deviation.
    """
    for slot in slots:
        if slot.name.endswith(".bias"):
            yield slot.name, torch.zeros(slot.shape)
        elif len(slot.shape) == 1:
            yield slot.name, torch.ones(slot.shape)
        else:
            digest = hashlib.blake2b(f"{seed} {slot.name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            yield slot.name, torch.randn(slot.shape, generator=generator) * std


MTP_METRIC: Final = "mtp_loss"


class MtpLoss:
    """Adds the loss of multi-token prediction to that of the model, and says what it was.

    The loss of layer k is the mean cross entropy, nats, over the loss tokens of the update that have k + 1 tokens
    before them; the layers' mean, times the weight, is added to the loss function's. All ranks of the last stage take
    part in its sum over dp and cp; one reports it.
    """

    def __init__(self, mesh: Mesh, options: MegatronEngineOptions) -> None:
        self._mesh, self._detached = mesh, options.mtp_detached
        self._shares = mesh.group("dp", "cp")
        self._scale, self._depths = options.mtp_loss_weight / options.mtp_layers, range(1, options.mtp_layers + 1)
        self.begin(())

    def begin(self, sequences: Sequence[TrainSequence]) -> None:
        """Begin an update; this rank computes a share of it."""
        places = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
        self._totals = [sum(int((each > depth).sum()) for each in places) for depth in self._depths]
        self._sums = torch.zeros(len(self._depths), device=self._mesh.device.torch_device)

    def attach(
        self, model: Any, hidden_L1E: Tensor, weight: Tensor | None, inputs: Sequence[MtpInputs], **layer: Any
    ) -> Tensor:
        """Return the hidden states as they are, with the gradient of the layers' loss behind them.

        Args:
            model: the last part: its layers, embedding and head are used.
            hidden_L1E: of the model, normalised; under sequence parallelism this rank's tokens.
            weight: of the head when it is shared.
            inputs: of each layer.
            **layer: further arguments of each transformer layer.
        """
        weight = model.output_layer.weight if weight is None else weight
        states = hidden_L1E.detach().requires_grad_() if self._detached else hidden_L1E
        loss = hidden_L1E.new_zeros(())
        for number, (block, asked) in enumerate(zip(model.mtp.layers, inputs, strict=True)):
            embedded = model.embedding(input_ids=asked.ids_1L, position_ids=None)
            if self._detached:
                embedded, weight = embedded.detach().requires_grad_(), weight.detach()
            states = _run(block, states, embedded, layer)
            logprobs_n, _ = model.output_layer.answer(states, weight, asked.predictor_n, asked.target_n)
            total = -logprobs_n.sum()
            self._sums[number] += total.detach()
            loss = loss + self._scale / max(self._totals[number], 1) * total
        found: Tensor = MTPLossAutoScaler.apply(hidden_L1E, loss)
        return found

    def metrics(self) -> Metrics:
        """Loss of each layer over the whole update, on the one rank that reports; a call of all."""
        with self._mesh.where(pp="last") as takes_part:
            if takes_part:
                self._shares.all_reduce(self._sums)
        if not self._mesh.where(pp="last", dp=0, cp=0, tp=0):
            return {}
        return {
            f"{MTP_METRIC}_{depth}": Metric(value=value / max(total, 1), weight=float(total))
            for depth, value, total in zip(self._depths, self._sums.tolist(), self._totals, strict=True)
        }


def _run(block: Any, states: Tensor, embedded: Tensor, layer: dict[str, Any]) -> Tensor:
    """Return one layer, computed again in the backward pass where the model's layers are."""

    def compute(states: Tensor, embedded: Tensor) -> Tensor:
        answer: Tensor = block._proj_and_transformer_layer(hidden_states=states, decoder_input=embedded, **layer)
        return answer

    if block.config.recompute_granularity != "full":
        return compute(states, embedded)
    # megatron-core's own way there hands everything to the checkpoint, which keeps tensors only.
    found: Tensor = tensor_parallel.checkpoint(compute, False, states, embedded)
    return found
