"""The model on one rank: megatron-core's GPTModel, cut over the mesh, that answers with log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from offbeat_engine_megatron._kernels import GROUPED, GROUPED_TE, TE, Kernels
from offbeat_engine_megatron._layers.attention import (
    PackAngles,
    PackedAttention,
    PackedParams,
    SequenceNorm,
    WholeLatentAttention,
)
from offbeat_engine_megatron._layers.embedding import add_deepstack, embed_images, leave_out_padding, make_tower
from offbeat_engine_megatron._layers.experts import GroupedExperts, Router, follow_routes
from offbeat_engine_megatron._layers.prediction import MtpLoss, mtp_block_spec, new_mtp_tensors
from offbeat_engine_megatron._layout import Plan
from offbeat_engine_megatron._lora import Adapters
from offbeat_engine_megatron._packing import PassInputs, gather_values, token_logprobs
from offbeat_engine_megatron._shape import ModelShape, angles_of, rotary_axes, rotary_frequencies
from offbeat_engine_megatron._slots import TOWER, Slot, list_mtp_slots, list_slots
from offbeat_engine_megatron._weights import HeldWeights, Put
from offbeat_mesh import Group, Mesh
from offbeat_training import TensorFolder


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Settings of the head; with `sequence_parallel` each tp rank holds some of the hidden states."""

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
        settings, weight = self.settings, self.weight if weight is None else weight
        how = {"scale": 1.0 / settings.temperature, "entropy_gradient": settings.entropy_gradient}
        values = torch.stack(self.answer(hidden_L1E, weight, asked.predictor_n, asked.target_n, **how))
        alone = settings.cp.size == 1 or asked.width == 0
        return values if alone else gather_values(values, asked.place_N, asked.width, settings.cp)

    def answer(
        self, hidden_L1E: Tensor, weight: Tensor, predictor_n: Tensor, target_n: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """[n] log-probabilities and [n] entropies of this rank's predictors; `how` is that of `token_logprobs`."""
        tp, cuts_tokens = self.settings.tp, self.settings.sequence_parallel
        spread = gather_from_sequence_parallel_region if cuts_tokens else copy_to_tensor_model_parallel_region
        hidden_LE = spread(hidden_L1E, group=tp.process_group)[:, 0]
        return token_logprobs(hidden_LE.index_select(0, predictor_n), weight, target_n, tp, **how)


class PolicyModel(GPTModel):  # type: ignore[misc]
    """One part of the model: hidden states go in and come out, ids at the first part, answers at the last.

    Args:
        plan: of the engine.
        kernels: that its layers compute with.
        mesh: over megatron's groups.
        mtp_loss: of the layers of multi-token prediction; None where there are none.
        tower: of the first part of a vision-language model; None elsewhere.
        **megatron: what megatron-core's own model takes.
    """

    def __init__(
        self, plan: Plan, kernels: Kernels, mesh: Mesh, mtp_loss: MtpLoss | None, tower: Any, **megatron: Any
    ) -> None:
        shape, device = plan.shape, mesh.device.torch_device
        super().__init__(
            vocab_size=shape.vocabulary,
            max_sequence_length=1,  # of learned positions, which rotary models lack
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            **megatron,
        )
        self.mtp_loss, self.visual = mtp_loss, tower
        self.attention = kernels.attention
        self.settings = HeadSettings(
            tp=mesh.group("tp"),
            cp=mesh.group("cp"),
            temperature=plan.options.temperature,
            entropy_gradient=plan.options.entropy_gradient,
            sequence_parallel=plan.parallel.sp,
        )
        frequencies_F = rotary_frequencies(plan.hf_config.get_text_config(), device)
        if shape.latent is None:
            self.rotary_pos_emb.inv_freq = frequencies_F
        for module in self.modules():
            if isinstance(module, PackAngles):
                module.frequencies_F = frequencies_F
        self.axes_F = rotary_axes(plan.hf_config, device) if shape.tower else None
        if self.post_process:
            if shape.tied and shape.mtp_layers and not self.pre_process:
                self.output_layer.weight = None  # a second copy that megatron-core allocates and never uses
            self.output_layer.__class__ = LogprobHead
            self.output_layer.settings = self.settings
        if shape.padding_id is not None and (self.pre_process or (self.post_process and shape.mtp_layers)):
            leave_out_padding(self.embedding, shape.padding_id, self.settings.tp, cuts_tokens=plan.parallel.sp)
        for number, layer in enumerate(self.decoder.layers[: shape.deepstack] if tower is not None else ()):
            layer.register_forward_hook(partial(add_deepstack, number), with_kwargs=True)
        for layer in self.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.register_forward_pre_hook(follow_routes, with_kwargs=True)
        for name, parameter in self.named_parameters():
            # megatron-core makes weights of routers and of gates on the CPU.
            parameter.data = parameter.data.to(device)
            if ".experts." in name:
                # megatron-core sets it for ep > 1 only; with ep = 1 and tp > 1 the ranks of tp would not add up.
                parameter.allreduce = False

    def forward(self, asked: PassInputs) -> Tensor:
        """Hidden states [L, 1, E], or on the last part of the model [2, N] log-probabilities and entropies."""
        masked, routes_tLK = asked.attention, asked.routes_TLK
        if routes_tLK is not None and self.settings.sequence_parallel:
            routes_tLK = routes_tLK.chunk(self.settings.tp.size)[self.settings.tp.rank]
        device = asked.ids_1L.device
        packed = PackedParams(asked.lengths, asked.gathered_T, device, self.attention, masked, routes_tLK)
        mask = None if masked is None else masked.mask
        first: Any = self.embedding(input_ids=asked.ids_1L, position_ids=None) if self.pre_process else None
        deeper: Tensor | None = None
        if self.visual is not None and asked.pixels_PC is not None:
            tp, cuts_tokens = self.settings.tp, self.settings.sequence_parallel
            first, deeper = embed_images(self.visual, asked, first, tp=tp, cuts_tokens=cuts_tokens)
        rotary = None if self.config.multi_latent_attention else self._angles(asked)  # there layers have their own
        hidden: Tensor = self.decoder(
            hidden_states=first, attention_mask=mask, context=deeper, rotary_pos_emb=rotary, packed_seq_params=packed
        )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self.mtp_loss is not None and asked.mtp:
            layer = {"attention_mask": mask, "rotary_pos_emb": rotary, "packed_seq_params": packed}
            hidden = self.mtp_loss.attach(self, hidden, weight, asked.mtp, **layer)
        answer: Tensor = self.output_layer(hidden, weight=weight, asked=asked)
        return answer

    def _angles(self, asked: PassInputs) -> Tensor:
        """[T, 1, 1, D] of all tokens; or of the longest sequence's, which megatron-core takes for each of them."""
        if asked.positions_3T is None:
            longest: Tensor = self.rotary_pos_emb.get_emb(max(asked.lengths))
            return longest  # its forward keeps every model alive in a cache
        assert self.axes_F is not None, "a pack with three axes of positions reached a model for text"
        return angles_of(asked.positions_3T, self.axes_F, self.rotary_pos_emb.inv_freq)


def transformer_config(plan: Plan, kernels: Kernels, *, recompute: bool) -> Any:
    """megatron-core's settings for a model on these ranks.

    The format is that of the weights and of what travels between layers. Parameters are made in it, ids go in and
    float32 comes out of the head, so megatron-core's Float16Module would have nothing left to convert.
    """
    shape, parallel, options, dtype = plan.shape, plan.parallel, plan.options, plan.dtype
    more: dict[str, Any] = {}
    if recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if shape.num_experts:
        more |= _expert_settings(shape, kernels)
    if (latent := shape.latent) is not None:
        more |= {
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.key_rank,
            "qk_head_dim": latent.plain_size,
            "qk_pos_emb_head_dim": latent.rotary_size,
            "v_head_dim": latent.value_size,
            "rope_type": "rope",  # with frequencies of this engine
            "rotary_scaling_factor": latent.rope_factor,
            "mscale_all_dim": latent.rope_mscale,
        }
    kind = TransformerConfig if latent is None else MLATransformerConfig
    return kind(
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
        attention_backend=AttnBackend.auto,  # of TransformerEngine's: the fastest that it has for a pack
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
        # Losses are sums over tokens of the whole update, divided by the caller: nothing is averaged on the way.
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
        **more,
    )


def _expert_settings(shape: ModelShape, kernels: Kernels) -> dict[str, Any]:
    settings = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.expert_size,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_score_function": "sigmoid" if shape.sigmoid_router else "softmax",
        "moe_router_pre_softmax": not shape.normalise_experts,
        "moe_router_topk_scaling_factor": shape.expert_scale,
        "moe_shared_expert_intermediate_size": shape.shared_size or None,
        "moe_shared_expert_gate": shape.shared_gate,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_layer_freq": [int(sparse) for sparse in shape.sparse_layers],
        "moe_grouped_gemm": kernels.experts == GROUPED_TE,
    }
    if shape.expert_groups is not None:
        settings |= {"moe_router_num_groups": shape.expert_groups[0], "moe_router_group_topk": shape.expert_groups[1]}
    return settings


def _leave(tensor: Tensor) -> Tensor:
    """Weights come from a checkpoint."""
    return tensor


def build_parts(
    plan: Plan, kernels: Kernels, mesh: Mesh, config: Any, mtp_loss: MtpLoss | None = None
) -> list[PolicyModel]:
    """Return the parts of the model that this rank holds, without weights yet: one, or with vpp several."""
    shape, parallel, stage = plan.shape, plan.parallel, mesh.coordinates["pp"]
    parts = []
    for part in range(parallel.vpp):
        first, last = stage == 0 and part == 0, stage == parallel.pp - 1 and part == parallel.vpp - 1
        number, tower = part if parallel.vpp > 1 else None, None
        if first and shape.tower:
            device, trained = mesh.device.torch_device, plan.options.train_vision
            tower = make_tower(plan.hf_config, config, device, trained=trained)
        model = PolicyModel(
            *(plan, kernels, mesh, mtp_loss, tower),
            config=config,
            transformer_layer_spec=_block(config, shape, kernels, stage, number),
            pre_process=first,
            post_process=last,
            vp_stage=number,
            mtp_block_spec=_mtp_block(shape, kernels) if last and shape.mtp_layers else None,
        )
        parts.append(model)
    return parts


def _block(
    config: Any, shape: ModelShape, kernels: Kernels, stage: int, part: int | None
) -> TransformerBlockSubmodules:
    """Layers of one part."""
    dense, sparse = (_layer(shape, kernels, experts) for experts in (None, shape.num_experts or None))
    first = get_transformer_layer_offset(config, vp_stage=part, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=part, pp_rank=stage)
    kinds: Sequence[bool] = shape.sparse_layers or [False] * shape.num_layers
    return TransformerBlockSubmodules(
        layer_specs=[sparse if kinds[layer] else dense for layer in range(first, first + count)],
        layer_norm=SequenceNorm,
    )


def _mtp_block(shape: ModelShape, kernels: Kernels) -> Any:
    """Layers of multi-token prediction, like the model's last one."""
    sparse = bool(shape.num_experts) and shape.sparse_layers[-1]
    return mtp_block_spec(_layer(shape, kernels, shape.num_experts if sparse else None), shape.mtp_layers)


def _layer(shape: ModelShape, kernels: Kernels, num_experts: int | None) -> ModuleSpec:
    """Return a layer of megatron-core's modules, local or TransformerEngine's, except what `_layers` computes.

    TransformerEngine's linear layers that bring a norm are replaced by those without: adapters need what lies between,
    and the parameters are then named as those of the local layers.
    """
    how: dict[str, Any] = {"num_experts": num_experts, "qk_layernorm": shape.qk_norm}
    if shape.latent is not None:
        how |= {"multi_latent_attention": True, "qk_layernorm": True}
    if kernels.layers == TE:
        spec = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=kernels.experts == GROUPED_TE, **how)
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", **how)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if kernels.layers == TE:
        attention.linear_qkv = TEColumnParallelLinear
        if num_experts is None:
            layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    if kernels.attention != TE:
        attention.core_attention = PackedAttention
    if num_experts is not None:
        layer.mlp.submodules.router = partial(Router, has_bias=shape.sigmoid_router)
        if kernels.experts == GROUPED:
            layer.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    layer.input_layernorm = layer.pre_mlp_layernorm = SequenceNorm
    if shape.latent is not None:
        layer.self_attention.module = WholeLatentAttention
        attention.q_layernorm = attention.kv_layernorm = SequenceNorm
    elif shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceNorm
    return spec


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The model that an engine trains, on this rank.

    Args:
        config: megatron-core's.
        parts: of the model, unwrapped.
        weights: of the model.
        mtp: weights of multi-token prediction, if there are such.
        mtp_loss: of them.
        adapters: with LoRA.
        trained: what the optimizer updates: all weights, but for a tower that is left as it is and biases of routers;
            or the adapters.
    """

    config: Any
    parts: list[PolicyModel]
    weights: HeldWeights
    mtp: HeldWeights | None
    mtp_loss: MtpLoss | None
    adapters: Adapters | None
    trained: tuple[HeldWeights, ...]

    @property
    def stored(self) -> list[HeldWeights]:
        """Return what a checkpoint sets: all weights, those too that do not train; or the adapters."""
        held = (self.weights, self.mtp) if self.adapters is None else (self.adapters.held,)
        return [each for each in held if each is not None]

    def load(self, plan: Plan, put: Put) -> None:
        """Read the model's folder. Layers of multi-token prediction that it lacks are new, alike in every layout."""
        folder, seed = Path(plan.config.model_path).expanduser(), plan.config.seed
        self.weights.read(folder, put)
        if self.adapters is not None:
            self.adapters.initialise(seed, put)
        if self.mtp is None:
            return
        with TensorFolder(folder) as tensors:
            known = any(slot.name in tensors.names for slot in self.mtp.slots)
        if known:
            self.mtp.read(folder, put)
        else:
            std = getattr(plan.hf_config, "initializer_range", 0.02)
            self.mtp.fill(new_mtp_tensors(self.mtp.slots, seed=seed, std=std), put)


def make_policy(plan: Plan, mesh: Mesh) -> Policy:
    """Return the model that trains, without weights yet."""
    shape, options, kernels = plan.shape, plan.options, plan.kernels(mesh.device)
    config = transformer_config(plan, kernels, recompute=plan.config.activation_checkpointing)
    mtp_loss = MtpLoss(mesh, options) if shape.mtp_layers else None
    parts = build_parts(plan, kernels, mesh, config, mtp_loss)
    lies = (shape, plan.parallel, kernels.experts)
    weights = HeldWeights(parts, list_slots(*lies), shape, mesh)
    mtp = HeldWeights(parts, list_mtp_slots(*lies), shape, mesh) if shape.mtp_layers else None
    num_held = sum(len(each.parameters) for each in (weights, mtp) if each is not None)
    assert num_held == sum(1 for part in parts for _ in part.parameters()), "no tensor of checkpoints fills a parameter"
    adapters = Adapters(parts, weights.slots, plan, mesh) if plan.config.lora_rank else None

    def learns(slot: Slot) -> bool:
        return not slot.frozen and (options.train_vision or not slot.name.startswith(TOWER))

    trained = [
        HeldWeights(parts, filter(learns, held.slots), shape, mesh)
        for held in ((weights, mtp) if adapters is None else (adapters.held,))
        if held is not None
    ]
    return Policy(
        config=config,
        parts=parts,
        weights=weights,
        mtp=mtp,
        mtp_loss=mtp_loss,
        adapters=adapters,
        trained=tuple(trained),
    )


def make_reference(plan: Plan, mesh: Mesh) -> list[PolicyModel]:
    """Return the first policy, which only answers, with its weights."""
    plan = replace(plan, shape=replace(plan.shape, mtp_layers=0))
    kernels = plan.kernels(mesh.device)
    parts = build_parts(plan, kernels, mesh, transformer_config(plan, kernels, recompute=False))
    for part in parts:
        part.requires_grad_(requires_grad=False)
    slots = list_slots(plan.shape, plan.parallel, kernels.experts)
    HeldWeights(parts, slots, plan.shape, mesh).read(Path(plan.config.model_path).expanduser())
    return parts
