"""Options of this backend, and how the ranks share a model: checked before any of them starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch

from offbeat_core import ConfigError, TrainEngineConfig, TrainLayout, check_schedule, read_options, setting
from offbeat_device import Device, open_device
from offbeat_engine_torch._layers.balance import check_balance
from offbeat_engine_torch._layers.exact import check_exact_model
from offbeat_engine_torch._layers.nf4 import NF4_BYTES
from offbeat_engine_torch._layers.recurrence import check_shared_heads, has_fused_rule
from offbeat_engine_torch._lengths import rotary_limit
from offbeat_engine_torch._model import outline_model, read_config
from offbeat_engine_torch._parallel.sharding import check_tensor_parallel
from offbeat_engine_torch._parallel.stacks import check_expert_parallel
from offbeat_mesh import Mesh
from offbeat_training import moment_bytes

GRADIENT_BYTES: Final = 4
"""Size of a gradient: ranks add up in float32."""

COPIES_AT_ONCE: Final = 4
"""States in the copies that a rank holds while it makes them: of two updates its own, and another rank's."""


@dataclass(frozen=True, kw_only=True)
class TorchEngineOptions:
    """Options of the torch engine."""

    temperature: float = setting(1.0, "Log-probabilities are those of softmax(logits / temperature).", gt=0)
    share_prompts: bool = setting(True, "Compute a prompt once for all sequences that begin with it.")
    entropy_gradient: bool = setting(False, "Let the loss's gradient flow through the entropy.")
    tensor_parallel: int = setting(1, "Ranks that share every layer; the ranks left over are data parallel.", ge=1)
    context_parallel: int = setting(
        1,
        "Ranks that share the tokens of each micro-batch, for sequences that one device cannot hold; "
        "max_tokens_per_microbatch counts those of all of them.",
        ge=1,
    )
    expert_parallel: int = setting(
        1,
        "Ranks that hold the experts of each layer between them, whole, and send each other tokens; they are taken out "
        "of the data and context parallel ranks, which they divide.",
        ge=1,
    )
    router_aux_loss: float = setting(
        0.0,
        "Coefficient of the loss that balances the experts that each sequence chooses, in every layer: 0, as RL "
        "leaves it, adds none, whatever the model's router_aux_loss_coef.",
        ge=0,
    )
    router_bias_rate: float = setting(
        0.0,
        "What a step adds to a router's correction bias of experts that fewer tokens chose than the mean, and takes "
        "from that of the others (DeepSeek-V3: 0.001 in pre-training); 0 leaves it.",
        ge=0,
    )
    data_parallel_replicate_degree: int = setting(
        1,
        "Replicas of the model, each cut over an equal part of the data and context parallel ranks (HSDP): weights are "
        "gathered within a replica, such as a node, and gradients are added up within it and then over replicas.",
        ge=1,
    )
    train_vision: bool = setting(True, "Train the vision tower, if there is one; false leaves it as it is.")
    head_dtype: str = setting(
        "auto",
        "Number format of the factors of the vocabulary head's products; logits are float32, but on devices without "
        "such products bfloat16 rounds them, by 0.01 to 0.1 nats. auto: bfloat16 where dtype is, and nothing rounds.",
        choices=("auto", "float32", "bfloat16"),
    )
    lora_base_dtype: str = setting(
        "auto",
        "Number format in which frozen matrices under LoRA adapters are held: bfloat16 takes half the memory of "
        "float32, and needs dtype bfloat16; nf4 holds those of the layers in 4 bits (QLoRA), a quarter of that, and "
        "computes in bfloat16. auto: as dtype. Adapters are float32 whatever it is, and so are embedding and head "
        "where the head's factors are.",
        choices=("auto", "float32", "bfloat16", "nf4"),
    )
    optimizer: str = setting(
        "adamw",
        "Rule of the updates: muon orthogonalises the momentum of the matrices between embedding and head, with the "
        "learning rate and decay of AdamW, and has one moment of each of their weights. AdamW updates the rest.",
        choices=("adamw", "muon"),
    )
    moments_dtype: str = setting(
        "float32",
        "Number format in which AdamW holds its two moments of each weight, 8 bytes in float32, and Muon its one: "
        "bfloat16 takes half of it, rounded at random, and int8 about a quarter, with a scale for each 256 weights of "
        "a row. Of vectors, and of matrices of fewer than 4096 weights, AdamW's stay float32.",
        choices=("float32", "bfloat16", "int8"),
    )
    offload_optimizer: bool = setting(
        False,
        "Moments wait in main memory, and pass through the device in each step, one parameter after the other. No "
        "result changes.",
    )
    offload_activations: bool = setting(
        False,
        "With activation_checkpointing, inputs of layers wait in main memory for the backward pass: the device holds "
        "those of two layers. No result changes.",
    )
    compile_layers: str = setting(
        "auto",
        "Compile the decoder layers with torch.compile: auto does on a device for which it can, where the layers "
        "compute in bfloat16; on refuses to start where it cannot. All ranks compile, or none does.",
        choices=("auto", "on", "off"),
    )
    replay_routes: bool = setting(
        True,
        "Take the experts that sequences say their tokens took when they were sampled; false: compare alone.",
    )
    reduce_once: str = setting(
        "auto",
        "Ranks add up gradients once a pass, not with each micro-batch: until then each holds 4 bytes for every weight "
        "of the model that trains. auto does where the devices have free memory for that; not on CPUs.",
        choices=("auto", "on", "off"),
    )
    reduce_dtype: str = setting(
        "float32",
        "Number format in which ranks add up the gradients of layers: bfloat16 sends half the bytes, rounds each sum "
        "to 8 bits, and needs dtype bfloat16. Sums of several micro-batches are float32 whatever it is.",
        choices=("float32", "bfloat16"),
    )
    peer_copies: bool = setting(
        False,
        "Each rank holds in main memory a copy of its weights and moments after an update, and one of another rank's, "
        "from which an application replaces a rank that dies: 24 bytes for each weight that a rank trains, 48 while "
        "copies are made.",
    )

    numerics: str = setting(
        "native",
        "exact: log-probabilities have the bits that the embedded sampler finds with the same option under the same "
        "weights, whatever the batch; of dense Qwen2, Qwen3 and Llama models, without tp and cp.",
        choices=("native", "exact"),
    )

    @property
    def is_exact(self) -> bool:
        return self.numerics == "exact"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Check names, types and bounds.

        Raises:
            ConfigError: whatever is wrong.
        """
        return read_options("the torch engine", cls, options)


def head_multiplies_in_bfloat16(config: TrainEngineConfig, options: TorchEngineOptions, device: Device) -> bool:
    """Return whether the factors of the vocabulary head's products are in bfloat16."""
    follows = options.head_dtype == "auto" and config.dtype == "bfloat16" and device.wide_products
    return follows or options.head_dtype == "bfloat16"


def gathers_vocabulary_in_bfloat16(config: TrainEngineConfig, options: TorchEngineOptions, device: Device) -> bool:
    """Return whether ranks gather embedding and head in bfloat16: where the head would round them anyway."""
    is_coarse = head_multiplies_in_bfloat16(config, options, device)
    return is_coarse and config.dtype == "bfloat16" and config.head == "tokens"


def holds_base_in_bfloat16(config: TrainEngineConfig, options: TorchEngineOptions) -> bool:
    """Return whether frozen weights under adapters are held in bfloat16, but for those that NF4 holds.

    Raises:
        ConfigError: they should be, and there are no adapters, or the layers compute in float32.
    """
    wanted = options.lora_base_dtype
    if wanted in ("bfloat16", "nf4") and not config.lora_rank:
        raise ConfigError(
            f'option lora_base_dtype = "{wanted}" needs frozen weights, and with lora_rank = 0 all are trained, in '
            'float32: set lora_rank, or leave the option "auto"'
        )
    if wanted in ("bfloat16", "nf4") and config.dtype != "bfloat16":
        raise ConfigError(
            f'option lora_base_dtype = "{wanted}" needs dtype = "bfloat16", got "{config.dtype}": layers multiply in '
            'the format of their weights; set dtype = "bfloat16", or leave the option "auto"'
        )
    if wanted == "nf4" and options.tensor_parallel > 1:
        raise ConfigError(
            f'option lora_base_dtype = "nf4" needs whole rows, which tensor_parallel = {options.tensor_parallel} cuts: '
            "leave tensor_parallel 1, and every rank holds its part of all weights (FSDP2) and gathers 4 bits of each"
        )
    return bool(config.lora_rank) and config.dtype == "bfloat16" and wanted != "float32"


def holds_base_in_nf4(options: TorchEngineOptions) -> bool:
    """Return whether matrices of the layers are held in NF4, where `holds_base_in_bfloat16` has refused nothing."""
    return options.lora_base_dtype == "nf4"


def check_nf4_over_ranks(options: TorchEngineOptions, num_ranks: int) -> None:
    """Refuse NF4 over ranks of dp and cp where torch gathers bytes as other numbers: 2.11 turns them to bfloat16.

    Raises:
        ConfigError: with the versions.
    """
    if holds_base_in_nf4(options) and num_ranks > 1 and torch.__version__ < "2.13":
        raise ConfigError(
            f'option lora_base_dtype = "nf4" over {num_ranks} ranks needs torch 2.13 or newer, whose FSDP2 gathers '
            f'bytes as they are: found {torch.__version__}; install it, or set the option "bfloat16"'
        )


def adds_up_in_bfloat16(config: TrainEngineConfig, options: TorchEngineOptions) -> bool:
    """Return whether ranks add up the gradients of layers in bfloat16.

    Raises:
        ConfigError: they should, and the layers compute in float32.
    """
    wanted = options.reduce_dtype == "bfloat16"
    if wanted and config.dtype != "bfloat16":
        raise ConfigError(
            f'option reduce_dtype = "bfloat16" needs dtype = "bfloat16", got "{config.dtype}": gradients of float32 '
            'would be rounded on their way alone; set dtype = "bfloat16", or leave the option "float32"'
        )
    return wanted


def check_numerics(config: TrainEngineConfig, options: TorchEngineOptions, *, shares_weights: bool) -> None:
    """Refuse what computes otherwise than exact numerics, where these are asked for.

    Args:
        config: of the engine.
        options: of the engine.
        shares_weights: ranks gather them, in the format of the layers.

    Raises:
        ConfigError: with what to change.
    """
    if not options.is_exact:
        return
    native = {"tensor_parallel": 1, "context_parallel": 1, "head_dtype": "auto"}
    wrong = [
        f"option {name} = {getattr(options, name)}" for name, value in native.items() if getattr(options, name) != value
    ]
    if options.compile_layers == "on":
        wrong.append('option compile_layers = "on"')
    if options.lora_base_dtype == "nf4":
        wrong.append('option lora_base_dtype = "nf4"')
    if config.head != "tokens":
        wrong.append(f'head = "{config.head}"')
    if config.lora_rank and config.dtype == "bfloat16" and shares_weights:
        wrong.append(f"lora_rank = {config.lora_rank} in bfloat16 on several ranks, which round adapters")
    if wrong:
        raise ConfigError(
            f'option numerics = "exact" has arithmetic of its own, which excludes {"; ".join(wrong)}: leave them '
            'out, or set numerics = "native"'
        )


def check_optimizer(config: TrainEngineConfig, options: TorchEngineOptions) -> None:
    """Refuse Muon, and a rule for routers' biases, where adapters are all that is trained: they are no matrices for
    Muon, see `hidden_matrices`, and a checkpoint of adapters holds no biases.

    Raises:
        ConfigError: with what to change.
    """
    if options.optimizer == "muon" and config.lora_rank:
        raise ConfigError(
            f'option optimizer = "muon" has no matrix to update with lora_rank = {config.lora_rank}: adapters are '
            'updated by AdamW; set lora_rank = 0, or optimizer = "adamw"'
        )
    if options.router_bias_rate and config.lora_rank:
        raise ConfigError(
            f"option router_bias_rate moves biases that lora_rank = {config.lora_rank} leaves as they are: set one to 0"
        )


def check_copies(options: TorchEngineOptions, num_ranks: int) -> None:
    """Refuse copies that no other rank could hold.

    Raises:
        ConfigError: with what to change.
    """
    if options.peer_copies and num_ranks == 1:
        raise ConfigError("option peer_copies needs a second rank to hold them: got one; add ranks, or set it to false")


def plan_layout(config: TrainEngineConfig, num_ranks: int) -> TrainLayout:
    """Check settings, options and the model's config; see `TorchTrainEngine.plan`."""
    options = TorchEngineOptions.parse(config.options)
    check_schedule(config)
    check_optimizer(config, options)
    check_numerics(config, options, shares_weights=num_ranks > 1)
    device = open_device(config.device)
    width, cp = options.tensor_parallel, options.context_parallel
    adds_up_in_bfloat16(config, options)
    check_copies(options, num_ranks)
    dp, ep = num_data_parallel(num_ranks, options), options.expert_parallel
    check_replicas(options, dp=dp, cp=cp)
    layout = layout_of(config, options, device, dp=dp, cp=cp, tp=width, ep=ep)
    check_nf4_over_ranks(options, dp * cp)
    if options.reduce_once == "on" and dp * cp > 1:
        layout = replace(layout, whole_gradient_bytes=GRADIENT_BYTES)
    hf_config = read_config(
        config.model_path, trust_remote_code=config.trust_remote_code, scores=config.head == "score"
    )
    if options.is_exact:
        check_exact_model(hf_config)
    if width > 1:
        check_tensor_parallel(hf_config, hf_config.model_type, width)
    if cp > 1:
        check_context_parallel(hf_config, cp)
    if ep > 1 or options.router_aux_loss or options.router_bias_rate:
        whole = outline_model(
            config.model_path, trust_remote_code=config.trust_remote_code, scores=config.head == "score"
        ).whole
        if ep > 1:
            check_expert_parallel(whole, ep)
        check_balance(whole, loss_weight=options.router_aux_loss, bias_rate=options.router_bias_rate)
    if limit := rotary_limit(hf_config):
        layout = replace(layout, max_sequence_tokens=limit.num_tokens, max_sequence_reason=limit.reason)
    return layout


def layout_of(
    config: TrainEngineConfig, options: TorchEngineOptions, device: Device, *, dp: int, cp: int, tp: int, ep: int
) -> TrainLayout:
    """Return how so many ranks hold a model while they add up gradients with each micro-batch.

    Raises:
        ConfigError: as `holds_base_in_bfloat16`.
    """
    is_muon = options.optimizer == "muon"
    frozen_bytes = NF4_BYTES if holds_base_in_nf4(options) else 2
    return TrainLayout(
        dp=dp,
        cp=cp,
        tp=tp,
        ep=ep,
        zero_stage=3,
        replicas=options.data_parallel_replicate_degree,
        optimizer_bytes=(1 if is_muon else 2) * moment_bytes(options.moments_dtype),
        vocabulary_optimizer_bytes=2 * moment_bytes(options.moments_dtype) if is_muon else 0,
        frozen_weight_bytes=frozen_bytes if holds_base_in_bfloat16(config, options) else 0,
        vocabulary_bytes=2 if gathers_vocabulary_in_bfloat16(config, options, device) else 4,
        offloads_optimizer=options.offload_optimizer,
        offloads_inputs=options.offload_activations,
        fuses_recurrence=config.dtype == "bfloat16" and has_fused_rule(),
        copied_bytes=COPIES_AT_ONCE * (4 + 4 * (1 if is_muon else 2)) if options.peer_copies else 0,
    )


def num_data_parallel(num_ranks: int, options: TorchEngineOptions) -> int:
    """Ranks that tensor and context parallelism leave over.

    Raises:
        ConfigError: these do not divide the ranks, or expert parallelism does not divide what tensor parallelism
            leaves over.
    """
    sizes = {name: getattr(options, name) for name in ("tensor_parallel", "context_parallel")}
    product: int = math.prod(sizes.values())
    if num_ranks % product:
        wanted = [f"{name} = {size}" for name, size in sizes.items() if size > 1]
        raise ConfigError(
            f"option {' times '.join(wanted)} must divide the ranks: got {num_ranks}; choose engine.num_ranks = "
            f"{product} or a multiple of it"
        )
    dp, ep = num_ranks // product, options.expert_parallel
    check_expert_ranks(dp=dp, cp=options.context_parallel, tp=options.tensor_parallel, ep=ep)
    return dp


def check_expert_ranks(*, dp: int, cp: int, tp: int, ep: int) -> None:
    """Refuse ranks of ep that are not taken out of those of dp and cp.

    Raises:
        ConfigError: with what to change.
    """
    if ep > 1 and tp > 1:
        raise ConfigError(f"ep = {ep} with tp = {tp}: ranks that share a layer's experts share no matrix; set tp to 1")
    if dp * cp % ep:
        raise ConfigError(f"option expert_parallel = {ep} must divide the ranks of dp and cp: got {dp} × {cp}")


def check_replicas(options: TorchEngineOptions, *, dp: int, cp: int) -> None:
    """Refuse replicas that the data parallel ranks do not make up, or that would be one rank each.

    Raises:
        ConfigError: with what to change.
    """
    num_replicas = options.data_parallel_replicate_degree
    if num_replicas > 1 and options.expert_parallel > 1:
        raise ConfigError(
            f"option data_parallel_replicate_degree = {num_replicas} with expert_parallel = {options.expert_parallel}: "
            "ranks of one model hold its experts between them; set one of the two to 1"
        )
    if num_replicas > 1 and (dp % num_replicas or dp * cp == num_replicas):
        raise ConfigError(
            f"option data_parallel_replicate_degree = {num_replicas} must divide the data parallel ranks, and leave "
            f"more than one rank to a replica: got {dp}; choose engine.num_ranks accordingly, or 1 for one model over "
            "all ranks"
        )


def split_replicas(mesh: Mesh, options: TorchEngineOptions) -> Mesh:
    """Return the mesh with replicas as its slowest axis, pp, which the torch engine has no other use for.

    Ranks are the same; its axes dp and cp are those of one replica. A call of all ranks.
    """
    check_replicas(options, dp=mesh.axes["dp"], cp=mesh.axes["cp"])
    num_replicas = options.data_parallel_replicate_degree
    if num_replicas == 1:
        return mesh
    sizes = {**{axis: mesh.axes[axis] for axis in ("cp", "tp")}, "dp": mesh.axes["dp"] // num_replicas}
    return Mesh(pp=num_replicas, **sizes, device=mesh.device, deadline_s=mesh.deadline_s, check=mesh.check)


def check_context_parallel(hf_config: Any, size: int) -> None:
    """Refuse a model whose tokens several ranks cannot share.

    Raises:
        ConfigError: its heads do not divide among them, where images or the delta rule need that.
    """
    config = hf_config.get_text_config()
    reason = ""
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        reason = check_shared_heads(config, size)
    if getattr(hf_config, "vision_config", None) is not None and config.num_attention_heads % size:
        # Tokens of one image may see each other, for which all of them have to be here.
        reason = f"with images, its num_attention_heads ({config.num_attention_heads}) must be a multiple of cp"
    if reason:
        raise ConfigError(f"cp = {size}: ranks cannot share the tokens of {config.model_type}: {reason}; set cp to 1")


def arrange(mesh: Mesh | None, options: TorchEngineOptions) -> Mesh | None:
    """Return the mesh to cut the model over, None where there is nothing to cut.

    A mesh of dp alone is so many ranks, which the options arrange.

    Raises:
        ConfigError: mesh and options contradict each other, or the options do not divide the ranks.
    """
    if mesh is None or mesh.size == 1:
        num_data_parallel(1, options)
        return None
    wanted = {"tp": options.tensor_parallel, "cp": options.context_parallel, "ep": options.expert_parallel}
    if all(size in (1, mesh.axes[axis]) for axis, size in wanted.items()):
        check_expert_ranks(**{axis: mesh.axes[axis] for axis in ("dp", "cp", "tp", "ep")})
        return mesh
    if mesh.size != mesh.axes["dp"] or mesh.axes["ep"] > 1:
        found = {axis: mesh.axes[axis] for axis in wanted}
        raise ConfigError(
            f"the mesh has {found}, and the options tensor_parallel, context_parallel and expert_parallel ask for "
            f"{wanted}: say it once"
        )
    dp = num_data_parallel(mesh.size, options)
    return Mesh(dp=dp, **wanted, device=mesh.device, deadline_s=mesh.deadline_s, check=mesh.check)
