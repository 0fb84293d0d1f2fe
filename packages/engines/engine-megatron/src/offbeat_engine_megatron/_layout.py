"""Settings of an engine, and how the ranks share a model: checked before anything starts.

Needs neither megatron-core nor another rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch

from offbeat_core import ConfigError, TrainEngineConfig, TrainLayout, check_schedule, read_options, setting
from offbeat_device import Device, open_device
from offbeat_engine_megatron._kernels import GROUPED, LOCAL, SEQUENTIAL, TE, Kernels, choose_kernels
from offbeat_engine_megatron._shape import ModelShape, read_model


@dataclass(frozen=True, kw_only=True)
class MegatronEngineOptions:
    """Options of the megatron engine. The ranks that the parallel sizes leave over are data parallel."""

    temperature: float = setting(1.0, "Log-probabilities are those of softmax(logits / temperature).", gt=0)
    entropy_gradient: bool = setting(False, "Let the loss's gradient flow through the entropy.")
    tensor_parallel: int = setting(1, "Ranks that share every layer.", "ranks", ge=1)
    sequence_parallel: bool = setting(True, "With tensor_parallel > 1: cut the tokens between layers over its ranks.")
    context_parallel: int = setting(1, "Ranks that share every sequence.", "ranks", ge=1)
    pipeline_parallel: int = setting(1, "Ranks that each hold some of the layers.", "ranks", ge=1)
    virtual_pipeline: int = setting(1, "Parts of the model that each rank of a pipeline holds.", "parts", ge=1)
    expert_parallel: int = setting(1, "Ranks that share the experts.", "ranks", ge=1)
    batch_p2p: bool = setting(False, "Send between stages in batched calls.")
    overlap_p2p: bool = setting(False, "With virtual_pipeline > 1: send between stages while computing.")
    distributed_optimizer: bool = setting(True, "Cut the optimizer's state over data and context parallel ranks.")
    overlap_grad_reduce: bool = setting(
        False, "Reduce gradients while the last micro-batch computes; then one forward_backward makes an update."
    )
    overlap_param_gather: bool = setting(
        False, "Gather updated weights while the next pass computes; needs distributed_optimizer, overlap_grad_reduce."
    )
    attention: str = setting(
        "auto",
        "Kernel: auto, that of layers = te, else the device's own under its masks, else varlen, one flash attention "
        "call for a pack, where device and format have it; or runs, one call for each sequence.",
        choices=("auto", "runs"),
    )
    layers: str = setting(
        "auto",
        "Modules of a layer: te, TransformerEngine's linear layers and attention; local, megatron-core's own; auto, te "
        "where TransformerEngine is installed and fits device and format.",
        choices=("auto", LOCAL, TE),
    )
    experts: str = setting(
        "auto",
        "How experts compute: grouped, all of a rank in one product; sequential, one after the other; auto, grouped "
        "where device and sizes allow it.",
        choices=("auto", GROUPED, SEQUENTIAL),
    )
    mtp_layers: int = setting(
        0, "Layers behind the model that predict later tokens; made anew where model_path holds none.", "layers", ge=0
    )
    mtp_loss_weight: float = setting(0.1, "Weight of their mean loss, which is added to the loss function's.", ge=0)
    mtp_detached: bool = setting(False, "Train these layers alone: no gradient from their loss to the model.")
    train_vision: bool = setting(True, "Train the vision tower, if there is one; false leaves it as it is.")
    save_deadline_s: float = setting(
        1800.0,
        "How long a checkpoint in the background is waited for: by ranks for each other, by a call for its end.",
        "s",
        gt=0,
    )

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Check names, types and bounds.

        Raises:
            ConfigError: whatever is wrong.
        """
        return read_options("the megatron engine", cls, options)


_OPTION_OF = {"tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes of the axes; vpp is the number of model parts per rank, sp whether tokens are cut between layers."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    sp: bool = False

    @property
    def size(self) -> int:
        """Return how many ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def sequence_multiple(self) -> int:
        """Each sequence of a pack is padded to a multiple of this: two chunks for every context parallel rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Each pack is padded to a multiple of this."""
        return self.sequence_multiple * (self.tp if self.sp else 1)

    def as_megatron_settings(self) -> dict[str, int | bool]:
        """Return settings under the names of megatron's command line, for a device's patches of megatron-core."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "sequence_parallel": self.sp,
            "use_flash_attn": True,
        }


def choose_parallel(axes: Mapping[str, int], options: MegatronEngineOptions) -> Parallel:
    """Sizes from a mesh's axes and the options.

    A mesh with dp alone is so many ranks, and the options say how they are used; a mesh with other axes says it
    itself, and options that say otherwise are refused.

    Raises:
        ConfigError: they contradict each other, do not divide the ranks, or megatron-core computes them wrongly.
    """
    asked = {axis: getattr(options, name) for axis, name in _OPTION_OF.items()}
    given = {axis: axes[axis] for axis in _OPTION_OF}
    if any(size > 1 for size in given.values()):
        wrong = [axis for axis in given if asked[axis] not in (1, given[axis])]
        if wrong:
            axis = wrong[0]
            raise ConfigError(
                f"the mesh has {axis} = {given[axis]} and option {_OPTION_OF[axis]} = {asked[axis]}: say it once"
            )
        sizes, dp = given, axes["dp"]
    else:
        sizes, dp = asked, _left_over(axes["dp"], asked)
    parallel = Parallel(**sizes, dp=dp, vpp=options.virtual_pipeline, sp=sizes["tp"] > 1 and options.sequence_parallel)
    _check_experts(parallel)
    _check_pipeline(parallel, options)
    _check_overlap(options)
    return parallel


def _left_over(num_ranks: int, asked: Mapping[str, int]) -> int:
    used = asked["tp"] * asked["cp"] * asked["pp"]
    if num_ranks % used:
        raise ConfigError(
            f"tensor_parallel · context_parallel · pipeline_parallel = {asked['tp']} · {asked['cp']} · {asked['pp']} "
            f"must divide the ranks: got {num_ranks}; choose engine.num_ranks = {used} or a multiple of it"
        )
    return num_ranks // used


def _check_experts(parallel: Parallel) -> None:
    stage = parallel.dp * parallel.cp * parallel.tp
    if stage % parallel.ep:
        raise ConfigError(
            f"expert_parallel must divide the {stage} ranks of a pipeline stage: got {parallel.ep}; "
            f"choose one of {', '.join(str(n) for n in range(1, stage + 1) if stage % n == 0)}"
        )
    if parallel.ep > 1 and parallel.tp > 1 and not parallel.sp:
        raise ConfigError(
            "experts with tensor_parallel > 1 need sequence_parallel = true: without it each rank of tp "
            "would send the same tokens to the experts"
        )


def _check_pipeline(parallel: Parallel, options: MegatronEngineOptions) -> None:
    if parallel.vpp > 1 and parallel.pp == 1:
        raise ConfigError(
            f"virtual_pipeline = {parallel.vpp} interleaves the stages of a pipeline: pipeline_parallel is 1"
        )
    if options.overlap_p2p and (parallel.vpp == 1 or options.batch_p2p):
        raise ConfigError(
            "overlap_p2p needs virtual_pipeline > 1 and batch_p2p = false: the plain schedule waits for "
            "each stage, and batched calls cannot overlap"
        )
    if parallel.vpp > 1 and options.batch_p2p and parallel.pp == 2:
        raise ConfigError(
            "virtual_pipeline > 1 on 2 stages with batch_p2p = true computes wrong results in megatron-core: with two "
            "stages the one before is also the one after, and a batch does not distinguish their messages; set "
            "batch_p2p = false"
        )


def _check_overlap(options: MegatronEngineOptions) -> None:
    if options.overlap_param_gather and not (options.distributed_optimizer and options.overlap_grad_reduce):
        raise ConfigError("overlap_param_gather needs distributed_optimizer = true and overlap_grad_reduce = true")


def check_model_fits(shape: ModelShape, parallel: Parallel) -> None:
    """Refuse a model that the ranks cannot share evenly, with the first thing that does not divide."""
    tp, stages = parallel.tp, parallel.pp * parallel.vpp
    what = [
        ("num_attention_heads", shape.num_heads, "tensor_parallel", tp),
        ("num_key_value_heads", shape.num_groups, "tensor_parallel", tp),
        ("intermediate_size", shape.ffn_size, "tensor_parallel", tp),
        ("width of the shared experts", shape.shared_size, "tensor_parallel", tp),
        ("vocab_size", shape.vocabulary, "tensor_parallel", tp),
        ("num_hidden_layers", shape.num_layers, "pipeline_parallel · virtual_pipeline", stages),
    ]
    if shape.num_experts:
        what.append(("num_experts", shape.num_experts, "expert_parallel", parallel.ep))
    for name, value, option, size in what:
        if value % size:
            raise ConfigError(
                f"{option} must divide the model's {name} = {value}: got {size}; "
                f"choose one of {', '.join(str(n) for n in range(1, value + 1) if value % n == 0)[:60]}"
            )
    if shape.deepstack > shape.num_layers // stages:
        raise ConfigError(
            f"DeepStack of {shape.family} adds what the vision tower sees to the first {shape.deepstack} layers, which "
            f"must lie beside it: pipeline_parallel · virtual_pipeline = {stages} leaves {shape.num_layers // stages} "
            "there; set both to 1"
        )
    if parallel.ep > 1 and not shape.num_experts:
        raise ConfigError(f"expert_parallel = {parallel.ep}: the model ({shape.family}) has no experts; set it to 1")
    if shape.num_experts and parallel.tp > 1 and not parallel.sp:
        raise ConfigError("experts with tensor_parallel > 1 need sequence_parallel = true")


_FORMATS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of an engine, checked before anything starts."""

    config: TrainEngineConfig
    options: MegatronEngineOptions
    hf_config: Any
    shape: ModelShape
    parallel: Parallel

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that the model computes with."""
        return _FORMATS[self.config.dtype]

    def kernels(self, device: Device) -> Kernels:
        """Return what computes on this device; ConfigError where what is asked for cannot be."""
        return choose_kernels(self.options, self.shape, self.dtype, device)


def plan_engine(config: TrainEngineConfig, axes: dict[str, int] | None = None) -> Plan:
    """Check everything that can be checked without megatron-core and without other ranks.

    Args:
        config: of the engine.
        axes: sizes of the mesh's axes; None for one process.
    """
    options = MegatronEngineOptions.parse(config.options)
    check_schedule(config)
    if config.head != "tokens":
        raise ConfigError(
            f"the megatron engine trains no {config.head} head: take an engine that has one, such as torch"
        )
    if config.dtype not in _FORMATS:
        raise ConfigError(f"the megatron engine computes in {' or '.join(_FORMATS)}: got dtype = {config.dtype}")
    parallel = choose_parallel(axes or dict.fromkeys(("dp", "cp", "tp", "pp", "ep"), 1), options)
    hf_config, shape = read_model(config.model_path, trust_remote_code=config.trust_remote_code)
    if options.mtp_layers and config.lora_rank:
        raise ConfigError("mtp_layers trains whole layers, and lora_rank adapters alone: set one of them to 0")
    shape = replace(shape, mtp_layers=options.mtp_layers)
    check_model_fits(shape, parallel)
    if shape.latent and config.lora_rank:
        raise ConfigError(
            f"lora_rank with multi-latent attention ({shape.family}): adapters here lie beside layers that ranks cut, "
            'and its first projections are whole; set lora_rank = 0, or use engine.backend = "torch"'
        )
    _check_tower(shape, config, options)
    return Plan(config=config, options=options, hf_config=hf_config, shape=shape, parallel=parallel)


def _check_tower(shape: ModelShape, config: TrainEngineConfig, options: MegatronEngineOptions) -> None:
    if shape.tower and config.lora_rank:
        raise ConfigError(
            f"lora_rank with a vision tower ({shape.family}): adapters here are those of megatron-core's layers, and "
            'the tower has none; set lora_rank = 0, or use engine.backend = "torch"'
        )
    if shape.tower and options.mtp_layers:
        raise ConfigError(
            f"mtp_layers with a vision tower ({shape.family}): they look up embeddings of later tokens, where images "
            "have none; set mtp_layers = 0"
        )


def _whole_parameters(shape: ModelShape) -> int:
    """Return how many weights ranks of tp do not share: projections to latent numbers."""
    if shape.latent is None:
        return 0
    width = (shape.latent.query_rank or 0) + shape.latent.key_rank + shape.latent.rotary_size
    return shape.num_layers * shape.hidden_size * width


def plan_layout(config: TrainEngineConfig, num_ranks: int) -> TrainLayout:
    """Return how so many ranks will share the model; see `offbeat_core.TrainBackend.plan`."""
    device = open_device(config.device)
    plan = plan_engine(config, {"dp": num_ranks, "cp": 1, "tp": 1, "pp": 1, "ep": 1})
    sizes = {axis: getattr(plan.parallel, axis) for axis in ("dp", "cp", "tp", "pp", "ep")}
    kernels = str(plan.kernels(device))
    layout = TrainLayout(**sizes, zero_stage=int(plan.options.distributed_optimizer), kernels=kernels)
    layout = replace(layout, whole_parameters=_whole_parameters(plan.shape))
    if config.dtype == "float32":
        return layout
    return replace(layout, weight_bytes=plan.dtype.itemsize, optimizer_bytes=12)  # a float32 copy beside the moments
