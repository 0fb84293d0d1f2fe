"""The model on one rank: megatron-core's GPTModel, cut over the mesh, that answers with log-probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from offbeat_engine_megatron._layers import PackedAttention, PackedParams, SequenceNorm, leave_out_padding
from offbeat_engine_megatron._layout import MegatronEngineOptions, Parallel
from offbeat_engine_megatron._mtp import TokensAhead, block_spec
from offbeat_engine_megatron._packing import PassInputs, gather_values, token_logprobs
from offbeat_engine_megatron._shape import ModelShape, angles_of
from offbeat_mesh import Group, Mesh

Look = Callable[[PassInputs, Tensor], tuple[Tensor, Tensor | None]]
"""See `_layers.look`."""


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """How the head answers.

    Args:
        tp: the ranks that share the vocabulary.
        cp: the ranks that share the pack.
        temperature: the sampler's.
        entropy_gradient: whether gradient flows through the entropy.
        sequence_parallel: each tp rank holds some of the tokens' hidden states.
    """

    tp: Group
    cp: Group
    temperature: float
    entropy_gradient: bool
    sequence_parallel: bool


class LogprobHead(ColumnParallelLinear):  # type: ignore[misc]
    """The vocabulary head, asked for a few tokens instead of all logits. GPTModel's head becomes one."""

    settings: HeadSettings

    def forward(
        self, hidden_L1E: Tensor, weight: Tensor | None = None, asked: PassInputs | None = None, **rest: Any
    ) -> Any:
        """[2, N] log-probabilities and entropies of the tokens asked for; without `asked` the plain layer's answer."""
        if asked is None:
            return super().forward(hidden_L1E, weight=weight, **rest)
        settings = self.settings
        if settings.sequence_parallel:
            hidden_L1E = gather_from_sequence_parallel_region(hidden_L1E, group=settings.tp.process_group)
        else:
            hidden_L1E = copy_to_tensor_model_parallel_region(hidden_L1E, group=settings.tp.process_group)
        answer = token_logprobs(
            hidden_L1E[:, 0].index_select(0, asked.predictor_n),
            self.weight if weight is None else weight,
            asked.target_n,
            settings.tp,
            scale=1.0 / settings.temperature,
            entropy_gradient=settings.entropy_gradient,
        )
        values: Tensor = torch.stack(answer)
        alone = settings.cp.size == 1 or asked.width == 0
        return values if alone else gather_values(values, asked.place_N, asked.width, settings.cp)


class PolicyModel(GPTModel):  # type: ignore[misc]
    """One part of the model: hidden states go in and come out, ids at the first part, answers at the last.

    Attributes:
        ahead: adds the loss of multi-token prediction, where there is such.
        look: puts what the vision tower sees among the embeddings, in the first part of a model that has one.
        axes_F: which axis of a position turns each frequency, where positions have three.
    """

    ahead: TokensAhead | None = None
    look: Look | None = None
    axes_F: Tensor | None = None

    def answer_with(self, settings: HeadSettings) -> None:
        """Make the head, where there is one, answer what is asked."""
        if self.post_process:
            self.output_layer.__class__ = LogprobHead
            self.output_layer.settings = settings

    def forward(self, asked: PassInputs) -> Tensor:
        """Hidden states [L, 1, E], or on the last part of the model [2, N] log-probabilities and entropies."""
        packed = PackedParams(asked.lengths, asked.gathered_T, asked.ids_1L.device)
        first: Any = self.embedding(input_ids=asked.ids_1L, position_ids=None) if self.pre_process else None
        deeper: Tensor | None = None
        if self.look is not None and asked.pixels_PC is not None:
            first, deeper = self.look(asked, first)
        rotary = self._angles(asked)
        hidden: Tensor = self.decoder(
            hidden_states=first, attention_mask=None, context=deeper, rotary_pos_emb=rotary, packed_seq_params=packed
        )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.ahead is not None and asked.ahead:
            hidden = self.ahead.attach(
                self, hidden, weight, asked.ahead, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed
            )
        answer: Tensor = self.output_layer(hidden, weight=weight, asked=asked)
        return answer

    def _angles(self, asked: PassInputs) -> Tensor:
        """[T, 1, 1, D] of all tokens; or of the longest sequence's, which megatron-core takes for each of them."""
        if asked.positions_3T is None:
            longest: Tensor = self.rotary_pos_emb.get_emb(max(asked.lengths))
            return longest  # its forward keeps every model alive in a cache
        assert self.axes_F is not None, "a pack with three axes of positions reached a model for text"
        return angles_of(asked.positions_3T, self.axes_F, self.rotary_pos_emb.inv_freq)


def transformer_config(
    shape: ModelShape, parallel: Parallel, options: MegatronEngineOptions, dtype: torch.dtype, **more: Any
) -> Any:
    """megatron-core's settings for a model on these ranks.

    Args:
        shape: of the model.
        parallel: sizes of the axes.
        options: of the engine.
        dtype: of the weights and of what travels between layers. Parameters are made in it, ids go in and float32
            comes out of the head, so megatron-core's Float16Module would have nothing left to convert.
        **more: further fields of `TransformerConfig`.
    """
    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {
            "num_moe_experts": shape.num_experts,
            "moe_ffn_hidden_size": shape.expert_size,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not shape.normalise_experts,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
            "moe_layer_freq": [int(sparse) for sparse in shape.sparse_layers],
        }
    return TransformerConfig(
        num_layers=shape.num_layers,
        mtp_num_layers=shape.mtp_layers or None,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        # Interleaved stages get packs of one length: on two stages their exchange of shapes takes the message of the
        # stage before for that of the stage after, since both are one rank.
        variable_seq_lengths=parallel.vpp == 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=options.batch_p2p,
        overlap_p2p_comm=options.overlap_p2p,
        # Losses are sums over tokens of the whole update, divided by whoever asks: nothing is averaged on the way.
        calculate_per_token_loss=True,
        # Not `perform_initialization=False`: that would also leave out the marks by which norms count no tensor twice.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **experts,
        **more,
    )


def _leave(tensor: Tensor) -> Tensor:
    """Weights come from a checkpoint."""
    return tensor


def build_parts(
    config: Any, shape: ModelShape, parallel: Parallel, mesh: Mesh, settings: HeadSettings, frequencies: Tensor
) -> list[PolicyModel]:
    """The parts of the model that this rank holds, without weights yet: one, or with vpp several.

    Args:
        config: megatron-core's.
        shape: of the model.
        parallel: sizes of the axes.
        mesh: over megatron's groups.
        settings: of the head.
        frequencies: [head size / 2] float32, of the rotary embedding.
    """
    stage, parts = mesh.coordinates["pp"], []
    for part in range(parallel.vpp):
        first, last = stage == 0 and part == 0, stage == parallel.pp - 1 and part == parallel.vpp - 1
        number = part if parallel.vpp > 1 else None
        model = PolicyModel(
            config=config,
            transformer_layer_spec=_block(config, shape, stage, number),
            vocab_size=shape.vocabulary,
            max_sequence_length=1,  # of learned positions, which rotary models lack
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            vp_stage=number,
            mtp_block_spec=_ahead(shape) if last and shape.mtp_layers else None,
        )
        if last and not first and shape.tied and shape.mtp_layers:
            model.output_layer.weight = None  # a second copy that megatron-core allocates and never uses
        model.rotary_pos_emb.inv_freq = frequencies
        model.answer_with(settings)
        if (first or (last and shape.mtp_layers)) and shape.padding_id is not None:
            leave_out_padding(model.embedding, shape.padding_id, settings.tp, cuts_tokens=settings.sequence_parallel)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                # megatron-core sets it for ep > 1 only; with ep = 1 and tp > 1 the ranks of tp would not add up.
                parameter.allreduce = False
        parts.append(model)
    return parts


def _block(config: Any, shape: ModelShape, stage: int, part: int | None) -> TransformerBlockSubmodules:
    """Layers of one part."""
    dense, sparse = (_layer(shape, experts) for experts in (None, shape.num_experts or None))
    first = get_transformer_layer_offset(config, vp_stage=part, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=part, pp_rank=stage)
    kinds: Sequence[bool] = shape.sparse_layers or [False] * shape.num_layers
    return TransformerBlockSubmodules(
        layer_specs=[sparse if kinds[layer] else dense for layer in range(first, first + count)],
        layer_norm=SequenceNorm,
    )


def _ahead(shape: ModelShape) -> MultiTokenPredictionBlockSubmodules:
    """Layers of multi-token prediction, like the model's last one."""
    sparse = bool(shape.num_experts) and shape.sparse_layers[-1]
    return block_spec(_layer(shape, shape.num_experts if sparse else None), shape.mtp_layers)


def _layer(shape: ModelShape, num_experts: int | None) -> ModuleSpec:
    """A layer of megatron-core's own modules, but for attention and norms."""
    spec = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceNorm
    return spec
